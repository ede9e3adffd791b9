"""Runs that end early and resume: the moment to end, the checkpoint to resume from, the layout to resume in."""

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import distributed as dist

from lightning_3d.errors import ConfigurationError, LayoutError
from lightning_3d.extensions import LayoutChooser
from lightning_3d.faults import Preemption
from lightning_3d.layout import Layout
from lightning_3d.module.anatomy import Anatomy
from lightning_3d.ranks import talk
from lightning_3d.strategy.checkpoints import Saving
from lightning_3d.strategy.in_shards import shards_of
from lightning_3d.strategy.run_note import RunNote, SavedRun, find_run, folders_of, leave_note, preempted_path, refit

T = TypeVar("T")
Resume = Literal["auto"]


class Resuming(Saving):
    """A run that may have started before, perhaps on another number of ranks, and may be preempted."""

    OF_PROCESS = (*Saving.OF_PROCESS, "_preemption")
    _preemption: Preemption | None = None
    _wanted: Layout
    _auto: LayoutChooser | None
    _data_parallel_size: int | Literal["auto"]

    def __init__(self, *, resume: Resume | None, **saving: Any) -> None:
        super().__init__(**saving)
        if resume not in (None, "auto"):
            raise ConfigurationError(f'resume={resume!r} is neither None nor "auto".')
        self._resume = resume
        self._given_path: object = None
        self._earlier: SavedRun | None = None
        self._refitted: Layout | None = None

    def _guarded(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        given = inspect.signature(function).bind_partial(*args, **kwargs).arguments
        self._given_path = given.get("ckpt_path")
        return super()._guarded(function, *args, **kwargs)

    def _before_layout(self) -> None:
        trainer = self._module.trainer
        self._earlier = self._refitted = None
        if self._auto is not None:
            self._auto.data = None
            if (in_shards := shards_of(self._module)) is not None:
                self._auto.chosen = in_shards.settings.layout
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self._resume != "auto" or not fitting or self._given_path is not None or trainer.global_step > 0:
            return
        saved = talk.from_first(lambda: find_run(trainer))
        if saved.checkpoints:
            self._earlier = saved
            self._load_from(trainer, saved)
            if saved.note is not None:
                self._keep_global_batch(trainer, saved.note)

    def _load_from(self, trainer: Trainer, saved: SavedRun) -> None:
        """Let the Trainer load the newest undamaged checkpoint of `saved`, as if it were `fit`'s `ckpt_path`.

        Rank 0 chooses it for all ranks, since file systems may show new files to some ranks late. Messages between
        ranks are possible only after `ckpt_path` is read, so `resume_start` of the private connector (Lightning 2.6) is
        replaced for one call.
        """
        connector: Any = trainer._checkpoint_connector

        def resume_start(checkpoint_path: object = None, weights_only: bool | None = None) -> None:
            del connector.resume_start
            self._keeper.instead = list(saved.checkpoints)
            connector.resume_start(saved.checkpoints[0], weights_only=weights_only)

        connector.resume_start = resume_start

    def _keep_global_batch(self, trainer: Trainer, note: RunNote) -> None:
        """On another number of ranks, choose a layout and accumulate batches in place of the missing ranks."""
        if self._auto is not None:
            self._choose_among(trainer, self._auto, note)
            return
        now = self._asked_layout()
        user = trainer.accumulate_grad_batches
        if now is not None and (
            now.data_parallel_size == note.data_parallel_size or _batches(now, user) == note.windows
        ):
            return
        self._check_can_accumulate(trainer, note)
        self._refitted, accumulate = refit(self._wanted, note.windows, self.world_size, _blocks(self._module))
        self._accumulate(trainer, accumulate)
        rank_zero_info(
            f"resume: {self.world_size} ranks now, layout {self._refitted} with accumulate_grad_batches={accumulate}"
            f" (was data {note.data_parallel_size}, {user}): an optimizer step sees the same {note.windows} batches."
        )

    def _choose_among(self, trainer: Trainer, auto: LayoutChooser, note: RunNote) -> None:
        """Under `layout="auto"`, set a data size that keeps the global batch: the earlier one, else the largest."""
        user = trainer.accumulate_grad_batches
        sizes = [size for size in auto.data_sizes(self.world_size) if note.windows % size == 0]
        if not sizes:
            raise LayoutError(
                f"{self.world_size} ranks cannot resume the run: an optimizer step was made of {note.windows}"
                ' batches (data ranks x accumulate_grad_batches), which no layout that layout="auto" may choose divides'
                " evenly. Start another number of ranks, or pass ckpt_path= to resume with your own settings."
            )
        if note.data_parallel_size in sizes and user == note.accumulate_grad_batches:
            auto.data = note.data_parallel_size
            return
        self._check_can_accumulate(trainer, note)
        auto.data = next((size for size in sizes if size == note.data_parallel_size), sizes[0])
        self._accumulate(trainer, note.windows // auto.data)
        rank_zero_info(
            f"resume: {self.world_size} ranks now, data {auto.data} with"
            f" accumulate_grad_batches={trainer.accumulate_grad_batches} (was data {note.data_parallel_size}, {user}):"
            f" an optimizer step uses the same {note.windows} batches."
        )

    def _accumulate(self, trainer: Trainer, number: int) -> None:
        user, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, number
        for name in ("limit_train_batches", "val_check_interval"):
            setattr(trainer, name, _scaled(name, getattr(trainer, name), number, user))

    def _asked_layout(self) -> Layout | None:
        """The layout of the user's settings on these ranks, None if they do not fit."""
        try:
            return self.layout
        except LayoutError:
            if self._data_parallel_size == "auto":
                return None
            raise

    def _check_can_accumulate(self, trainer: Trainer, note: RunNote) -> None:
        user, accumulated = trainer.accumulate_grad_batches, note.accumulate_grad_batches
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        reasons = {
            f"data_parallel_size={self._data_parallel_size} is set": self._data_parallel_size != "auto",
            f"accumulate_grad_batches={user} is set where the run had {accumulated}": user != accumulated,
            "a GradientAccumulationScheduler decides": any(
                isinstance(c, GradientAccumulationScheduler) and c.going_to_accumulate_grad_batches() for c in callbacks
            ),
            "the module optimizes manually": not self._module.automatic_optimization,
        }
        for reason, holds in reasons.items():
            if holds:
                raise LayoutError(
                    f'resume="auto": the run had {note.data_parallel_size} data ranks x {accumulated} accumulated'
                    f" batches; on {self.world_size} ranks now another number must be accumulated to keep the global"
                    f" batch, but {reason}. Start the run's own number of ranks, undo that setting, or pass ckpt_path="
                    " to fit, which uses your settings unchanged."
                )

    def _watch_run(self, trainer: Trainer) -> None:
        """Watch for preemption and leave a note. Callbacks are set up; Lightning does not handle signals yet."""
        self._preemption = Preemption(trainer, self._largest, lambda: preempted_path(trainer))
        if self._resume == "auto" and trainer.state.fn == TrainerFn.FITTING and self.is_global_zero:
            try:
                leave_note(trainer, self._note(trainer))
            except OSError as error:
                rank_zero_warn(
                    f'A later start with resume="auto" cannot find this run, since its note cannot be written: {error}'
                )

    def _note(self, trainer: Trainer) -> RunNote:
        old = self._earlier.note if self._earlier is not None else None
        accumulated, data = trainer.accumulate_grad_batches, self.layout.data_parallel_size
        folders = dict.fromkeys([*folders_of(trainer), *(old.folders if old is not None else ())])
        if old is not None and data * accumulated == old.windows:
            data, accumulated = old.data_parallel_size, old.accumulate_grad_batches
        return RunNote(tuple(folders), data, accumulated)

    def _largest(self, numbers: list[int]) -> talk.Largest:
        return talk.Largest(numbers, dist.group.WORLD if self.world_size > 1 else None)

    def teardown(self) -> None:
        if self._preemption is not None:
            self._preemption.close()
            self._preemption = None
        super().teardown()


def _batches(layout: Layout, accumulated: int) -> int:
    return layout.data_parallel_size * accumulated


def _blocks(module: torch.nn.Module) -> int | None:
    """Number of blocks between which the module can be cut, if it is built already."""
    chains = Anatomy.of(module).chains
    return len(chains[0].blocks) if chains else None


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
