"""Loaders of Lightning's loops: the samples that were used when an epoch is resumed, and loaders that it builds anew.

Lightning restores the number of batches. `FitLoop.setup_data` builds loaders and their first iterator. `reset` chooses
the position in the epoch. The strategy's `on_train_start` follows, then epochs run.
"""

import warnings
from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_3d.data.position import Counted, Place, counter_of, is_shared
from lightning_3d.errors import UnsupportedError
from lightning_3d.launch.lightning_private import Stateful, set_sampler_epoch
from lightning_3d.module.undo import UndoStack
from lightning_3d.sandbox.first_batch import promised_samples

NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"


def places(fit_loop: Any) -> list[Place | None] | None:
    """The position of each loader in this epoch, where it is known; None between epochs."""
    combined, progress = fit_loop._combined_loader, fit_loop.epoch_loop.batch_progress
    batches, _ = _batches(progress)
    if combined is None or batches == 0 or progress.is_last_batch:
        return None
    counters = [counter_of(loader) for loader in combined.flattened]
    return [None if c is None else c.place(_in_cycle(combined, c, batches)) for c in counters]


def continues_shared_order(fit_loop: Any) -> bool:
    """Return True if the rest of the run depends on samplers that the data ranks share.

    Between epochs it does not if those do not shuffle: Lightning's own samplers give the same order.
    """
    if fit_loop._combined_loader is None or places(fit_loop) is not None:
        return True
    counters = [counter_of(loader) for loader in fit_loop._combined_loader.flattened]
    return any(counter is None or (is_shared(counter.sampler) and counter.sampler.shuffle) for counter in counters)


def loader_states(fit_loop: Any) -> list[dict[str, Any]]:
    combined = fit_loop._combined_loader
    return [] if combined is None else combined._state_dicts()


def resume_epoch(fit_loop: Any, found: Any, restore_streams: Callable[[], None]) -> None:
    """Set the fit loop, which is about to run, to the position of the saved one, a `FoundState`."""
    combined, progress = fit_loop._combined_loader, fit_loop.epoch_loop.batch_progress
    if found.data is None and fit_loop.restarting:
        return  # of Lightning's own checkpoint, whose epoch goes on as there
    if combined is None or not fit_loop.restarting:
        restore_streams()
        if combined is not None and fit_loop.is_resuming:  # saved after `fit`: an epoch is about to begin
            _iterate(fit_loop, found.loaders)
        return
    (batches, at_batch_end), over = _batches(progress), progress.is_last_batch
    skip = fit_loop.max_batches if over else 0
    if batches and not over:
        skip = _take_up(fit_loop, found, batches)
        over = skip >= fit_loop.max_batches
        if over:  # the rest gives this many data ranks no full batch
            fit_loop.epoch_loop.batch_progress.is_last_batch = True
            if at_batch_end:  # as `FitLoop.reset` does where it finds the last batch had
                fit_loop.epoch_progress.increment_processed()
                fit_loop.epoch_progress.increment_completed()
    if skip < float("inf"):
        _move(progress, skip - batches)
    if over and at_batch_end:
        fit_loop.reset_restart_stage()  # a new epoch begins; else Lightning calls no `on_train_epoch_start` for it
    if over and not at_batch_end:  # only the end of the epoch, after its last batch, is left
        fit_loop._data_fetcher.done = True
        restore_streams()
    elif skip == 0 or over:
        restore_streams()
        _iterate(fit_loop, found.loaders)
    else:
        _iterate(fit_loop, found.loaders)
        restore_streams()


def _batches(progress: Any) -> tuple[int, bool]:
    """Return the number of batches of the epoch that are done at a restart, and True if a batch was just ending."""
    total = progress.total
    at_batch_end = total.ready == total.started == total.processed == total.completed + 1
    return progress.current.completed + at_batch_end, at_batch_end


def _in_cycle(combined: Any, counter: Counted, batches: int) -> int:
    """The number of `batches` in the current pass over this loader: a short one may repeat within an epoch."""
    length = len(counter)
    return batches % length if combined._mode == "max_size_cycle" and length else min(batches, length)


def _take_up(fit_loop: Any, found: Any, batches: int) -> int:
    """Set loaders to their positions; returns the number of batches of the epoch that are skipped."""
    combined, saved = fit_loop._combined_loader, found.places
    counters = [counter_of(loader) for loader in combined.flattened]
    known = saved if saved is not None and len(saved) == len(counters) else [None] * len(counters)
    for loader in combined.flattened:
        set_sampler_epoch(loader, fit_loop.epoch_progress.current.processed)
    skips = {
        len(counter): counter.go_on_from(place, _in_cycle(combined, counter, batches), found.same_data_ranks)
        for counter, place in zip(counters, known, strict=True)
        if counter is not None
    }
    if saved is not None:
        if any(counter is not None and not counter.follows for counter in counters):
            rank_zero_warn(
                "The number of data ranks changed inside an epoch, and no DistributedSampler distributes the samples:"
                " every rank skips the same share of its own dataloader. Some samples may be used twice or not at all."
            )
        if all(counter_of(loader) is not None or isinstance(loader, Stateful) for loader in combined.flattened):
            warnings.filterwarnings("ignore", NOT_RESUMABLE)
    longest = min(skips) if combined._mode == "min_size" and skips else max(skips, default=None)
    return batches if longest is None or len(skips) < len(counters) else skips[longest]


def _move(progress: Any, batches: int) -> None:
    """Count in new batches: another number of data ranks divides the epoch into others."""
    for count in ("ready", "started", "processed", "completed"):
        setattr(progress.current, count, getattr(progress.current, count) + batches)


def _iterate(fit_loop: Any, states: list[dict[str, Any]]) -> None:
    """Begin an iteration at the restored progress; that of `setup_data` may be older."""
    combined = fit_loop._combined_loader
    for loader in combined.flattened if states else ():
        drawn = getattr(getattr(loader, "batch_sampler", None), "sampler", None) or getattr(loader, "sampler", None)
        if isinstance(loader, Stateful) and type(drawn) is DistributedSamplerWrapper:
            rank_zero_warn(
                f"{type(loader).__name__} shuffles by a sampler of its own. What divides that among data ranks keeps no"
                " state, so the rest of the epoch comes in another order: some samples are used twice, and others not"
                " at all. DataLoader(shuffle=True) of torch resumes with the samples that were not used yet."
            )
    waiting = fit_loop._combined_loader_states_to_load
    if not waiting and all(counter_of(loader) is None for loader in combined.flattened):
        return
    combined.reset()  # ends the workers that were started for the older iteration
    for loader in combined.flattened:
        set_sampler_epoch(loader, fit_loop.epoch_progress.current.processed)
        if (counter := counter_of(loader)) is not None:
            counter.restart()
    fit_loop._combined_loader_states_to_load = []
    combined._load_state_dicts(states)
    iter(fit_loop._data_fetcher)


def mark_saved(trainer: Any) -> None:
    """Let checkpoint callbacks of a resumed run know that its step is saved already (read in lightning 2.6).

    They check the number of steps only, which is also right within the first accumulation window. A checkpoint from
    there lacks the gradients of that window, and a run that resumes from it loses them.
    """
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            callback._last_global_step_saved = max(callback._last_global_step_saved, trainer.global_step)


def check_remade_loaders(trainer: Any, undo: UndoStack) -> None:
    """Compare each loader that Lightning builds anew, for any loop, with the one it was given. `undo` reverts it.

    Lightning calls the loader's class again with the arguments of the user's call, and its distributed sampler on top.
    A class that chooses by `sampler=None`, as that of scvi-tools does, then collates what its dataset has already
    batched. Batches of another shape are refused.
    """
    connector = trainer._data_connector
    prepare = connector._prepare_dataloader

    def prepared(loader: Any, *args: Any, **kwargs: Any) -> Any:
        made = prepare(loader, *args, **kwargs)
        if made is not loader and isinstance(loader, DataLoader) and _collated(made) != _collated(loader):
            raise UnsupportedError(
                f"Lightning builds the {type(loader).__name__} anew, with a sampler that divides it over the data"
                f" ranks. The loader itself {_collated(loader)}, and the new one {_collated(made)}: batches would have"
                " another shape than on one device. Give the loader a sampler that is a torch DistributedSampler,"
                " made with trainer.distributed_sampler_kwargs: Lightning keeps that one. For a package that asks for"
                " the name of the strategy, see docs/packages.md."
            )
        return made

    undo.set(connector, "_prepare_dataloader", prepared)


def _collated(loader: DataLoader[Any]) -> str:
    if loader.batch_sampler is None:
        return "takes what its dataset gives for a batch"
    return f"collates {promised_samples(loader) or 'several'} samples of its dataset"
