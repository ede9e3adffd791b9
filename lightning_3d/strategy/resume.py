"""Runs that end early and resume: the layout to resume in, the checkpoint to resume from, the moment to end."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import distributed as dist

from lightning_3d.checkpoint import Keeper
from lightning_3d.errors import LayoutError
from lightning_3d.extensions import LayoutChooser
from lightning_3d.faults import Preemption
from lightning_3d.layout import DATA_AXIS, Layout
from lightning_3d.module.anatomy import Anatomy
from lightning_3d.ranks import talk
from lightning_3d.strategy.in_shards import shards_of
from lightning_3d.strategy.one_run import Run
from lightning_3d.strategy.run_note import RunNote, SavedRun, find_run, leave_note, note_of, preempted_path, refit
from lightning_3d.strategy.settings import Settings


class Sizes:
    """The layout on any number of ranks: by the settings, by the planner's choice, or as an earlier run needs it."""

    def __init__(self, settings: Settings, auto: LayoutChooser | None) -> None:
        self.settings, self.auto = settings, auto
        self.refitted: Layout | None = None
        """The layout in which a run is resumed."""

    def layout(self, world_size: int) -> Layout:
        layout = self.refitted or self.settings.base
        if self.auto is not None:
            layout = self.auto.layout(world_size)
        elif self.settings.fills_data:
            layout = layout.fit(world_size)
        return self.settings.fit(layout, world_size)

    def begin_run(self, module: LightningModule) -> None:
        """Forget what the last run needed. A module in shards needs its layout."""
        self.refitted = None
        if self.auto is not None:
            self.auto.data = None
            if (in_shards := shards_of(module)) is not None:
                self.auto.chosen = in_shards.layout

    def keep_global_batch(self, module: LightningModule, note: RunNote, world_size: int) -> None:
        """On another number of ranks, choose a layout and accumulate batches in place of the missing ranks."""
        trainer = module.trainer
        if self.auto is not None:
            self._choose_among(module, self.auto, note, world_size)
            return
        now = self._asked_layout(world_size)
        user = trainer.accumulate_grad_batches
        ranks = None if now is None else now.data_parallel_size
        if ranks is not None and (ranks == note.data_parallel_size or ranks * user == note.windows):
            return
        self._check_can_accumulate(module, note, world_size)
        chains = Anatomy.of(module).chains  # none where the module is not built yet
        blocks = len(chains[0].blocks) if chains else None
        self.refitted, accumulate = refit(self.settings.base, note.windows, world_size, blocks)
        _accumulate(trainer, accumulate)
        rank_zero_info(
            f"resume: {world_size} ranks now, layout {self.refitted} with accumulate_grad_batches={accumulate}"
            f" (was data {note.data_parallel_size}, {user}): an optimizer step sees the same {note.windows} batches."
        )

    def _choose_among(self, module: LightningModule, auto: LayoutChooser, note: RunNote, world_size: int) -> None:
        """Under `layout="auto"`, set a data size that keeps the global batch: the earlier one, else the largest."""
        trainer = module.trainer
        user = trainer.accumulate_grad_batches
        sizes = [size for size in auto.data_sizes(world_size) if note.windows % size == 0]
        if not sizes:
            raise LayoutError(
                f"{world_size} ranks cannot resume the run: an optimizer step was made of {note.windows}"
                ' batches (data ranks x accumulate_grad_batches), which no layout that layout="auto" may choose divides'
                " evenly. Start another number of ranks, or pass ckpt_path= to resume with your own settings."
            )
        if note.data_parallel_size in sizes and user == note.accumulate_grad_batches:
            auto.data = note.data_parallel_size
            return
        self._check_can_accumulate(module, note, world_size)
        auto.data = next((size for size in sizes if size == note.data_parallel_size), sizes[0])
        _accumulate(trainer, note.windows // auto.data)
        rank_zero_info(
            f"resume: {world_size} ranks now, data {auto.data} with"
            f" accumulate_grad_batches={trainer.accumulate_grad_batches} (was data {note.data_parallel_size}, {user}):"
            f" an optimizer step uses the same {note.windows} batches."
        )

    def _asked_layout(self, world_size: int) -> Layout | None:
        """The layout of the user's settings on these ranks, None if they do not fit."""
        try:
            return self.layout(world_size)
        except LayoutError:
            if self.settings.fills_data:
                return None
            raise

    def _check_can_accumulate(self, module: LightningModule, note: RunNote, world_size: int) -> None:
        trainer, size = module.trainer, self.settings.sizes[DATA_AXIS]
        user, accumulated = trainer.accumulate_grad_batches, note.accumulate_grad_batches
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        reasons = {
            f"data_parallel_size={size} is set": not self.settings.fills_data,
            f"accumulate_grad_batches={user} is set where the run had {accumulated}": user != accumulated,
            "a GradientAccumulationScheduler decides": any(
                isinstance(c, GradientAccumulationScheduler) and c.going_to_accumulate_grad_batches() for c in callbacks
            ),
            "the module optimizes manually": not module.automatic_optimization,
        }
        for reason, holds in reasons.items():
            if holds:
                raise LayoutError(
                    f'resume="auto": the run had {note.data_parallel_size} data ranks x {accumulated} accumulated'
                    f" batches; on {world_size} ranks now another number must be accumulated to keep the global"
                    f" batch, but {reason}. Start the run's own number of ranks, undo that setting, or pass ckpt_path="
                    " to fit, which uses your settings unchanged."
                )


def resume_earlier(run: Run, sizes: Sizes, keeper: Keeper, world_size: int) -> None:
    """Go on with the newest checkpoint of this run, and its global batch, if it has been started before. Collective."""
    if run.trainer.global_step > 0:
        return
    saved = talk.from_first(lambda: find_run(run.trainer))
    if saved.checkpoints:
        run.earlier = saved
        _load_from(run.trainer, saved, keeper)
        if saved.note is not None:
            sizes.keep_global_batch(run.module, saved.note, world_size)


def _load_from(trainer: Trainer, saved: SavedRun, keeper: Keeper) -> None:
    """Let the Trainer load the newest undamaged checkpoint of `saved`, as if it were `fit`'s `ckpt_path`.

    Rank 0 chooses it for all ranks, since file systems may show new files to some ranks late. Messages between ranks
    need a read `ckpt_path`, so `resume_start` of the private connector (Lightning 2.6) is replaced for one call.
    """
    connector: Any = trainer._checkpoint_connector

    def resume_start(checkpoint_path: object = None, weights_only: bool | None = None) -> None:
        del connector.resume_start
        keeper.instead = list(saved.checkpoints)
        connector.resume_start(saved.checkpoints[0], weights_only=weights_only)

    connector.resume_start = resume_start


def watch_preemption(run: Run, layout: Layout) -> None:
    """Watch for preemption and leave a note. Callbacks are set up; Lightning does not handle signals yet."""

    def largest(numbers: list[int]) -> talk.PendingMax:
        return talk.PendingMax(numbers, dist.group.WORLD if layout.world_size > 1 else None)

    run.preemption = Preemption(run.trainer, largest, lambda: preempted_path(run.trainer))
    if run.settings.resume == "auto" and run.fitting and run.trainer.is_global_zero:
        try:
            leave_note(run.trainer, note_of(run.trainer, layout, run.earlier))
        except OSError as error:
            rank_zero_warn(
                f'A later start with resume="auto" cannot find this run, since its note cannot be written: {error}'
            )


def _accumulate(trainer: Trainer, number: int) -> None:
    user, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, number
    for name in ("limit_train_batches", "val_check_interval"):
        setattr(trainer, name, _scaled(name, getattr(trainer, name), number, user))


def _scaled(name: str, value: object, accumulate: int, before: int) -> object:
    """A Trainer setting that counts batches of one rank, scaled to the same samples."""
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if value * accumulate % before:
        raise LayoutError(
            f"{name}={value} batches with accumulate_grad_batches={before} is no whole number of batches with"
            f" accumulate_grad_batches={accumulate}. Give it as a fraction (a float), or as a multiple of {before}."
        )
    return value * accumulate // before
