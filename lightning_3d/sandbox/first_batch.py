"""Reads the first batch of the loop that is about to run, without taking it away from the loop."""

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_3d.errors import UnsupportedError

_LARGE = 1 << 20


def loaders_of(trainer: Trainer) -> CombinedLoader:
    """The loaders of the loop that is about to run.

    They come from the loop's data source (read in lightning 2.6). A loop that does not know the number of its batches
    reads one already when it is set up.
    """
    loops: dict[Any, Any] = {
        TrainerFn.FITTING: trainer.fit_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    loaders = loops[trainer.state.fn]._data_source.dataloader()
    if isinstance(loaders, CombinedLoader):
        return loaders
    return CombinedLoader(loaders, "max_size_cycle" if trainer.state.fn == TrainerFn.FITTING else "sequential")


def map_style(loaders: CombinedLoader) -> bool:
    """Return True if every loader reads from a dataset by index, so that reading takes no batch away."""
    every = loaders.flattened
    maps = [isinstance(each, DataLoader) and not isinstance(each.dataset, IterableDataset) for each in every]
    return bool(maps) and all(maps)


def first_batch(loaders: CombinedLoader) -> Any:
    """The first batch, from a separate iterator; raises where the loop would lose it.

    A stream is read from a copy, since it may remember its position. The loaders' own generators are put back. The
    caller restores the main random streams.
    """
    if any(map(_gone_once_read, loaders.flattened)):
        raise UnsupportedError("the data can be read only once, and the loop needs it")
    before = [(generator, generator.get_state()) for each in loaders.flattened for generator in _generators(each)]
    own = loaders.flattened
    loaders.flattened = [_on_a_copy(each) for each in own]
    try:
        batch, _, _ = next(iter(loaders))
    finally:
        loaders.reset()
        loaders.flattened = own
        for generator, state in before:
            generator.set_state(state)
    return batch


def _gone_once_read(loader: Any) -> bool:
    """Return True if data comes from an iterator: the loader, its stream, or an attribute of that (a file)."""
    data = getattr(loader, "dataset", None)
    inner = vars(data).values() if isinstance(data, IterableDataset) else ()
    return any(isinstance(each, Iterator) for each in (loader, data, *inner))


def _on_a_copy(loader: Any) -> Any:
    """`loader`, or a loader of a copy of its stream where this process would read the stream."""
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, IterableDataset) or loader.num_workers:
        return loader
    shared = {id(each): each for each in vars(loader.dataset).values() if _data_itself(each)}
    reads = copy.copy(loader)
    try:
        vars(reads)["dataset"] = copy.deepcopy(loader.dataset, shared)  # a loader refuses another one by assignment
    except (TypeError, pickle.PicklingError) as error:
        raise UnsupportedError(f"the stream may remember what was read, and cannot be copied ({error})") from error
    return reads


def _data_itself(value: Any) -> bool:
    """Return True for a tensor that is too large to be the position of a stream, and maybe too large to copy."""
    return isinstance(value, Tensor) and value.nbytes > _LARGE


def _generators(loader: Any) -> list[torch.Generator]:
    """Generators of the order of samples and of the seeds of workers."""
    holders = [loader, *(getattr(loader, name, None) for name in ("dataset", "sampler", "batch_sampler"))]
    found = [getattr(holder, "generator", None) for holder in [*holders, getattr(holders[-1], "sampler", None)]]
    return [generator for generator in found if isinstance(generator, torch.Generator)]


def loader_batch_size(trainer: Trainer) -> int | None:
    """Samples in a batch of the training loader; None for several loaders, or one without a batch size."""
    return promised_samples(trainer.train_dataloader)


def promised_samples(loader: Any) -> int | None:
    """Samples in a batch of `loader`; None for several loaders, or one without a batch size."""
    if isinstance(loader, CombinedLoader):
        return promised_samples(loader.flattened[0]) if len(loader.flattened) == 1 else None
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


def step_arguments(step: Callable[..., Any], batch: Any) -> tuple[Any, ...]:
    """The arguments with which Lightning would call `step`: the batch, then as many indices as it takes."""
    return (batch, 0, 0)[: len(inspect.signature(step).parameters)]
