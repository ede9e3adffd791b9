"""`Checkpoints`: saves and loads the state of a strategy, by calls into `checkpoint/`."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import LightningDataModule, LightningModule
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_3d.axes import state_dict
from lightning_3d.checkpoint import Keeper, Splits
from lightning_3d.checkpoint.averaged import AveragedWeights, PendingCopies
from lightning_3d.checkpoint.full_files import with_configs
from lightning_3d.checkpoint.rank_state import FoundState, find_state, rank_state, restore_state
from lightning_3d.checkpoint.stored import RANKS
from lightning_3d.data.loaders_private import continues_shared_order, loader_states, mark_saved, places, resume_epoch
from lightning_3d.errors import UnsupportedError
from lightning_3d.faults import flight
from lightning_3d.layout import Coordinate, Layout
from lightning_3d.ranks import talk
from lightning_3d.sandbox.trees import leaves
from lightning_3d.strategy.one_run import Run
from lightning_3d.strategy.settings import Settings
from lightning_3d.usercode.averages_private import AVERAGES

PATIENCE = 60.0
"""Seconds that a failing rank gives a save in the background."""


@dataclass(frozen=True)
class Saved:
    """The state that is saved, also before and after a run."""

    module: LightningModule
    optimizers: Sequence[Optimizer]
    splits: Splits
    io: CheckpointIO
    run: Run | None
    alone: bool
    """True for the only rank of a job."""
    forked: bool
    """True where other processes, which this one started, have run."""


class Checkpoints:
    """The checkpoints of a strategy. A copy starts without state."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.keeper = Keeper(settings.checkpoint_format, settings.async_checkpoint, settings.timeout)
        self.found = FoundState()
        """This rank's state in the checkpoint that the run resumes from."""
        self.averages: AveragedWeights | None = None
        """Finds copies of the weights of the last `fit`: its callbacks may still have some."""
        self.waiting: PendingCopies | None = None
        """States of callbacks that they get once the module is placed."""
        self.left: Mapping[str, Any] = {}
        """This rank's state at the end of the last `fit`, for a checkpoint that is saved after it."""

    def __reduce__(self) -> Any:
        return Checkpoints, (self.settings,)

    def begin_run(self, run: Run) -> None:
        self.waiting = None
        if run.fitting:
            self.left = {}

    def end_run(self, run: Run) -> None:
        """Keep this rank's state for a checkpoint after `fit`: code in between draws random numbers too."""
        if run.fitting and run.steps is not None and not (run.failure.alone or run.trainer.interrupted):
            self.left = self._rank_state(run)

    def load_callbacks(self, run: Run) -> None:
        """Give callbacks their copies of weights, sharded like the weights, now that the module is placed."""
        self.averages, waiting, self.waiting = AveragedWeights(run.placed), self.waiting, None
        if waiting is not None:
            waiting.give(run.trainer, run.placed)

    def as_saved(self, module: LightningModule, io: CheckpointIO) -> AbstractContextManager[None]:
        """Return shards for a sharded checkpoint, full states for a single file."""
        return state_dict.as_shards() if self.keeper.is_sharded(module, io) else nullcontext()

    def save(self, checkpoint: dict[str, Any], filepath: Any, options: Any, saved: Saved) -> None:
        flight.at(f"saving {filepath}")
        here = saved.run or dist.is_initialized() or not saved.forked
        if not here and checkpoint.get("optimizer_states") == []:
            raise UnsupportedError(
                f"{filepath} would have no step and no optimizer state. The processes that trained have ended, as those"
                " that a notebook forks. Save during fit, by ModelCheckpoint or in a hook; for the weights alone call"
                " trainer.save_checkpoint(path, weights_only=True)."
            )
        checkpoint = without_modules(checkpoint, saved.module)
        own = self._own(saved) if "optimizer_states" in checkpoint else {}
        if self.keeper.is_sharded(saved.module, saved.io):
            copies: Mapping[int, Any] = {}
            if self.averages is not None:
                checkpoint, copies = self.averages.in_shards(checkpoint, talk.gather)
            self.keeper.save(
                checkpoint, filepath, module=saved.module, optimizers=saved.optimizers, splits=saved.splits, own=own,
                copies=copies,
            )  # fmt: skip
            return
        if self.averages is not None:
            checkpoint = self.averages.gather_full(checkpoint, talk.gather)
        owns = talk.gather(own)
        full = with_configs({**checkpoint, RANKS: owns} if own else checkpoint, saved.module)
        self.keeper.save_file(full, filepath, saved.io, options)

    def take(self, loaded: dict[str, Any], layout: Layout, place: Coordinate, callbacks: Sequence[Any]) -> None:
        """Take what this rank and some callbacks load later out of a loaded checkpoint."""
        unsplit = {callback.state_key for callback in callbacks if isinstance(callback, AVERAGES)}
        self.waiting = PendingCopies.take(loaded, unsplit)
        self.found = find_state(loaded.pop(RANKS, ()), layout, place)
        loop = loaded.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        if "combined_loader" in loop:
            loop["combined_loader"] = self.found.loaders

    def resume(self, run: Run) -> None:
        """Resume the samples, random streams and error feedback of the checkpoint, at the start of training."""
        random, communication, scale = run.running.random, run.data_axis, run.plugin.loss_scale()
        found, self.found = self.found, FoundState()
        resume_epoch(run.trainer.fit_loop, found, lambda: restore_state(found, random, communication, scale))
        mark_saved(run.trainer)

    def wait(self) -> None:
        """Wait for a save in the background while there is a process group."""
        try:
            self.keeper.wait(PATIENCE)
        except Exception as error:  # another one ends the run; a dead peer fails the save too
            rank_zero_warn(f"The save in the background has failed: {error}")

    def _own(self, saved: Saved) -> Mapping[str, Any]:
        run = saved.run
        if self.left and (run is None or run.steps is None or not run.fitting):
            return self.left if dist.is_initialized() or saved.alone else {}  # it takes that of all ranks
        return {} if run is None else self._rank_state(run)

    def _rank_state(self, run: Run) -> Mapping[str, Any]:
        if run.steps is None or run.opened is None:
            return {}
        loop = run.trainer.fit_loop
        return rank_state(
            run.chosen,
            run.place,
            run.steps.random,
            run.data_axis,
            run.plugin.loss_scale(),
            places(loop),
            loader_states(loop),
            (run.shares_order or run.chosen.data_parallel_size > 1) and continues_shared_order(loop),
        )


KEYS = (LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY)


def without_modules(checkpoint: dict[str, Any], module: nn.Module) -> dict[str, Any]:
    """Return `checkpoint` without hyperparameters that contain a part of `module` with parameters.

    `save_hyperparameters()` in `__init__(self, net)` refers to the network itself. During training its blocks have
    hooks and shards of weights. A pickle of it would fail, or contain the shards of one rank.
    """
    parts = {id(part) for part in module.modules() if next(part.parameters(), None) is not None}
    result = dict(checkpoint)
    for key in KEYS:
        values = checkpoint.get(key)
        if isinstance(values, dict):
            names = [name for name, value in values.items() if any(id(leaf) in parts for leaf in leaves(value))]
            result[key] = {name: value for name, value in values.items() if name not in names}
            if names:
                rank_zero_warn(
                    f"Checkpoints have no hyperparameter {', '.join(names)}: it is a module, whose weights are in the"
                    f" checkpoint by name. Pass it to load_from_checkpoint(..., {names[0]}=...). Without this warning:"
                    f" save_hyperparameters(ignore={names})."
                )
    return result
