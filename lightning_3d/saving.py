"""What `Strategy3D` does with checkpoints: Lightning's hooks, each a call into `checkpoint/`."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.fabric.utilities.optimizer import _optimizers_to_device
from torch.optim import Optimizer

from lightning_3d import state
from lightning_3d.checkpoint import CheckpointFormat, Keeper, Splits, load_optimizer, load_weights, tell_of_last
from lightning_3d.checkpoint.own import own_state, restore_own, same_layout
from lightning_3d.checkpoint.stored import RANKS, materialize
from lightning_3d.compose import Composed
from lightning_3d.processes import Processes
from lightning_3d.steps import Steps


class Saving(Processes):
    """Checkpoints of a module that may be in parts."""

    _composed: Composed | None
    _steps: Steps | None
    _own_states: Sequence[Any] = ()
    """What was each rank's own in the checkpoint that a run goes on from."""

    def __init__(self, *, checkpoint_format: CheckpointFormat, **processes: Any) -> None:
        super().__init__(**processes)
        self._keeper = Keeper(checkpoint_format)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._composed is not None:
            self._composed.data.rest()
        with self._as_saved():
            return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with self._as_saved():
            return super().optimizer_state(optimizer)

    def _as_saved(self) -> AbstractContextManager[None]:
        """A sharded checkpoint takes states as each rank holds them, a single file takes them whole."""
        sharded = self._keeper.is_sharded(self._module, self.checkpoint_io)
        return state.in_parts() if sharded else nullcontext()

    @property
    def _splits(self) -> Splits:
        return self._composed.splits if self._composed is not None else {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._keeper.is_sharded(self._module, self.checkpoint_io):
            self._keeper.save(
                checkpoint,
                filepath,
                module=self._module,
                optimizers=self.optimizers,
                splits=self._splits,
                own=self._own_state(),
            )
        elif self.is_global_zero:
            self._keeper.save_file(checkpoint, filepath, self.checkpoint_io, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        loaded = self._keeper.load(checkpoint_path, weights_only, self.checkpoint_io)
        self._own_states = loaded.pop(RANKS, ())
        return loaded

    def _own_state(self) -> dict[str, Any]:
        if self._steps is None or self._communication is None:
            return {}
        return own_state(self.layout, self._steps.random, self._communication.compressions)

    def process_dataloader(self, dataloader: object) -> object:
        """Go on with the random streams and leftovers of the checkpoint before the next epoch draws its order."""
        if self._own_states and self._steps is not None and self._module.trainer.training:
            states, self._own_states = self._own_states, ()
            if len(states) == self.world_size and same_layout(states[self.global_rank], self.layout):
                assert self._communication is not None
                mine = materialize(states[self.global_rank])
                restore_own(mine, self._steps.random, self._communication.compressions)
        return super().process_dataloader(dataloader)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._composed is not None:
            self._composed.data.rest()
        load_weights(self._module, checkpoint["state_dict"], strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for index, (optimizer, stored) in enumerate(zip(self.optimizers, checkpoint["optimizer_states"], strict=True)):
            load_optimizer(optimizer, stored, self._module, self._splits, f"the state of optimizer {index}")
            _optimizers_to_device([optimizer], self.root_device)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            self._keeper.remove(filepath, self.checkpoint_io)


def _note(trainer: Any, newest_first: list[str]) -> None:
    if isinstance(trainer.strategy, Saving):
        trainer.strategy._keeper.instead = newest_first


tell_of_last(_note)
