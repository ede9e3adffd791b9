"""Checkpoints of `Strategy3D`: Lightning's hooks, each a call into `checkpoint/`."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import distributed as dist
from torch.optim import Optimizer

from lightning_3d.checkpoint import CheckpointFormat, Keeper, Splits, load_optimizer, load_weights, watching_last
from lightning_3d.checkpoint.averaged import AveragedWeights, PendingCopies
from lightning_3d.checkpoint.full_files import with_configs
from lightning_3d.checkpoint.module_hyperparameters import without_modules
from lightning_3d.checkpoint.rank_state import FoundState, find_state, rank_state, restore_state
from lightning_3d.checkpoint.stored import RANKS
from lightning_3d.data.fit_loop import continues_shared_order, go_on, loader_states, no_new_epoch_yet, places
from lightning_3d.data.position import counted
from lightning_3d.data.same_samples import seed_workers_by_data_rank
from lightning_3d.faults import flight
from lightning_3d.module import state_dict
from lightning_3d.offload.offload_choice import NOTHING
from lightning_3d.optim.step import move_states
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.precision import Precision3D
from lightning_3d.ranks import talk
from lightning_3d.sandbox.deferred import Built
from lightning_3d.strategy.on_axes import OnAxes
from lightning_3d.strategy.steps import CheckedSteps
from lightning_3d.usercode.averages_private import AVERAGES

T = TypeVar("T")
PATIENCE = 60.0
"""Seconds that a failing rank gives a save in the background."""


class Saving(OnAxes):
    """Checkpoints of a module that may be sharded."""

    OF_PROCESS = (*OnAxes.OF_PROCESS, "_parallel", "_steps", "_averages", "_left", "_built")
    _built: tuple[Built, ...] = ()
    """Modules that were built since the last run."""
    _parallel: ParallelModule | None = None
    _steps: CheckedSteps | None = None
    _offload = NOTHING
    _found = FoundState()
    """This rank's state in the checkpoint that the run resumes from."""
    _averages: AveragedWeights | None = None
    """Finds copies of the weights of the last `fit`: its callbacks may still have some."""
    _waiting: PendingCopies | None = None
    """States of callbacks that they get once the module is placed."""
    _left: Mapping[str, Any] = {}
    """This rank's state at the end of the last `fit`, for a checkpoint that is saved after it."""

    def __init__(self, *, checkpoint_format: CheckpointFormat, async_checkpoint: bool, **processes: Any) -> None:
        super().__init__(**processes)
        self._keeper = Keeper(checkpoint_format, async_checkpoint, self._timeout)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._parallel is not None:
            self._parallel.data.reshard()
        with self._as_saved():
            return super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        with self._as_saved():
            return super().optimizer_state(optimizer)

    def _as_saved(self) -> AbstractContextManager[None]:
        """Return shards for a sharded checkpoint, full states for a single file."""
        sharded = self._keeper.is_sharded(self._module, self.checkpoint_io)
        return state_dict.as_shards() if sharded else nullcontext()

    @property
    def _divides(self) -> bool:
        """True where ranks are going to have parts of a module that has values."""
        return self.world_size > 1 and self._simulation is None

    @property
    def _splits(self) -> Splits:
        return self._parallel.parameters.split if self._parallel is not None else lambda _: None

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        flight.at(f"saving {filepath}")
        checkpoint = without_modules(checkpoint, self._module)
        own = self._rank_state() if "optimizer_states" in checkpoint else {}
        if self._keeper.is_sharded(self._module, self.checkpoint_io):
            copies: Mapping[int, Any] = {}
            if self._averages is not None:
                checkpoint, copies = self._averages.in_shards(checkpoint, talk.gather)
            self._keeper.save(
                checkpoint,
                filepath,
                module=self._module,
                optimizers=self.optimizers,
                splits=self._splits,
                own=own,
                copies=copies,
            )
            return
        if self._averages is not None:
            checkpoint = self._averages.gather_full(checkpoint, talk.gather)
        owns = talk.gather(own)
        full = with_configs({**checkpoint, RANKS: owns} if own else checkpoint, self._module)
        self._keeper.save_file(full, filepath, self.checkpoint_io, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        flight.at(f"loading {checkpoint_path}")
        loaded = self._keeper.load(checkpoint_path, weights_only, self.checkpoint_io)
        trainer: Any = getattr(self.lightning_module, "_trainer", None)  # none before a run
        callbacks = trainer.callbacks if trainer is not None else []
        unsplit = {callback.state_key for callback in callbacks if isinstance(callback, AVERAGES)}
        self._waiting = PendingCopies.take(loaded, unsplit)
        self._found = found = find_state(loaded.pop(RANKS, ()), self.layout, self.coordinate)
        self._shares_order = found.shares_order
        if self._mesh is not None:
            self._choose_samplers()
        loop = loaded.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        if "combined_loader" in loop:
            loop["combined_loader"] = found.loaders
        return loaded

    def _guarded(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        def note(newest_first: list[str]) -> None:
            self._keeper.instead = newest_first

        with watching_last(note):  # Lightning reads ckpt_path="last" before any hook of a strategy
            return super()._guarded(function, *args, **kwargs)

    def setup_environment(self) -> None:
        self._waiting = None
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            self._left = {}
        super().setup_environment()

    def _end_of_run(self) -> None:
        """Keep this rank's state for a checkpoint after `fit`: code in between draws random numbers too."""
        trainer = self._module.trainer
        if trainer.state.fn == TrainerFn.FITTING and not trainer.interrupted:
            self._left = self._rank_state()

    def _load_callbacks(self) -> None:
        """Give callbacks their copies of weights, sharded like the weights, now that the module is placed."""
        assert self._parallel is not None
        self._averages, waiting, self._waiting = AveragedWeights(self._parallel), self._waiting, None
        if waiting is not None:
            waiting.give(self._module.trainer, self._parallel)

    # ---- the state of one rank ---------------------------------------------------------------------------------

    def _rank_state(self) -> Mapping[str, Any]:
        if self._left and (self._steps is None or self._module.trainer.state.fn != TrainerFn.FITTING):
            return self._left if dist.is_initialized() or self.world_size == 1 else {}  # it takes that of all ranks
        if self._steps is None or self._data_axis is None:
            return {}
        loop = self._module.trainer.fit_loop
        return rank_state(
            self.layout,
            self.coordinate,
            self._steps.random,
            self._data_axis,
            self._loss_scale(),
            places(loop),
            loader_states(loop),
            (self._shares_order or self.layout.data_parallel_size > 1) and continues_shared_order(loop),
        )

    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        seed_workers_by_data_rank(dataloader, self.coordinate.data)
        return counted(dataloader) if self._module.trainer.training else dataloader

    def on_train_start(self) -> None:
        """Resume the samples, random streams and error feedback of the checkpoint."""
        super().on_train_start()
        assert self._steps is not None
        assert self._data_axis is not None
        random, communication, scale = self._steps.random, self._data_axis, self._loss_scale()
        found, self._found = self._found, FoundState()
        go_on(self._module.trainer.fit_loop, found, lambda: restore_state(found, random, communication, scale))
        no_new_epoch_yet(self._module.trainer)

    def _loss_scale(self) -> float:
        plugin = self.precision_plugin
        assert isinstance(plugin, Precision3D)
        return plugin.loss_scale()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._parallel is not None:
            self._parallel.data.reshard()
        self._built = ()  # none keeps its first value
        whole = self._parallel is None and self._in_shards is None and self._divides
        if whole:
            self.precision_plugin.convert_module(self._module)  # before there are values to convert
        load_weights(self._module, checkpoint["state_dict"], strict, self.root_device if whole else None)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for index, (optimizer, stored) in enumerate(zip(self.optimizers, checkpoint["optimizer_states"], strict=True)):
            load_optimizer(optimizer, stored, self._module, self._splits, f"the state of optimizer {index}")
            move_states([optimizer], self.root_device, self._offload.optimizer is not None)

    def on_exception(self, exception: BaseException) -> None:
        """Wait for a save in the background while there is a process group."""
        try:
            self._keeper.wait(PATIENCE)
        except Exception as error:  # `exception` ends the run; a dead peer fails the save too
            rank_zero_warn(f"The save in the background has failed: {error}")
        super().on_exception(exception)
        if self._failed:
            self._keeper.forget()

    def teardown(self) -> None:
        super().teardown()
        self._keeper.close()

    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            self._keeper.remove(filepath, self.checkpoint_io)
