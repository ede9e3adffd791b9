"""One batch through the whole module before it is placed: what each block is called with, and what comes out."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from lightning_3d.errors import UnsupportedError
from lightning_3d.layout import Layout
from lightning_3d.pipeline import seeds
from lightning_3d.pipeline.logs import LogTap, Record
from lightning_3d.pipeline.means import unlike_its_mean
from lightning_3d.pipeline.microbatch import microbatch_sizes, split_batch
from lightning_3d.pipeline.rehearse import as_before
from lightning_3d.pipeline.step import loss_of
from lightning_3d.pipeline.whole import Whole, observe
from lightning_3d.tensor.record import Recording, record_calls
from lightning_3d.tensor.units import find_units

STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


def record_one_batch(trainer: Trainer, module: LightningModule, to_device: Callable[[Any], Any]) -> Recording | None:
    """Run the step that is about to run on its first batch, without gradients, and watch the blocks.

    Random streams, buffers and plain attributes are as before afterwards and nothing is logged. None where there is no
    block to split or the step cannot be run by itself; then inputs are made up.
    """
    if not find_units(module) or not module.automatic_optimization:
        return None
    assert trainer.state.fn is not None
    step = getattr(module, STEPS[trainer.state.fn])
    try:
        with seeds.set_aside(), as_before(module), LogTap(module).recording(Record()):
            batch = to_device(first_batch(trainer))
            return record_calls(module, lambda: step(*step_arguments(step, batch)))
    except Exception as error:
        warnings.warn(
            f"{STEPS[trainer.state.fn]} could not be run on one batch ahead of training"
            f" ({type(error).__name__}: {error}). What the blocks are called with is guessed from their sizes instead;"
            " blocks that take more than one tensor stay whole.",
            stacklevel=2,
        )
        return None


def loader_batch_size(trainer: Trainer) -> int | None:
    """Samples in a batch of the one training loader, None where there are several or it does not say."""
    loader = trainer.train_dataloader
    size = getattr(loader, "batch_size", None)
    if size is None:
        size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def observe_one_batch(
    trainer: Trainer,
    module: LightningModule,
    units: Sequence[str],
    layout: Layout,
    to_device: Callable[[Any], Any],
    context: Callable[[], AbstractContextManager[Any]],
    mean: bool,
) -> Whole | None:
    """Run the step that is about to run on the first microbatch of its first batch, forward and backward, and watch.

    None where the batch cannot be read twice (a stream) or the step cannot be run by itself on every rank: then the
    pipeline learns what it can from the first step. Collective; what one rank raises, all raise.

    Args:
        units: names of the modules that a pipeline will place.
        context: entered around a step (autocast).
        mean: whether the loss will be taken for a mean over samples; the user is told if it is none.
    """
    found: Whole | None = None
    said: Any = None
    try:
        with seeds.set_aside(), as_before(module):
            found = _observe(trainer, module, units, layout, to_device, context, mean)
        said = (found.calls, found.read) if found is not None else None
    except UnsupportedError as error:
        said = error
    except Exception as error:
        rank_zero_warn(
            f"{STEPS[trainer.state.fn]} could not be run on a microbatch ahead of training ({type(error).__name__}:"  # type: ignore[index]
            f" {error}). The order of its blocks is read from the code, and that they tell each other nothing beside"
            " their arguments is taken on trust."
        )
    everyone: list[Any] = [said] * dist.get_world_size()
    dist.all_gather_object(everyone, said)
    for answer in everyone:
        if isinstance(answer, UnsupportedError):
            raise answer
    if found is None or None in everyone:
        return None
    calls, read = everyone[0]
    return replace(found, calls=calls, read=read)  # all ranks must cut alike


def _observe(
    trainer: Trainer,
    module: LightningModule,
    units: Sequence[str],
    layout: Layout,
    to_device: Callable[[Any], Any],
    context: Callable[[], AbstractContextManager[Any]],
    mean: bool,
) -> Whole | None:
    assert trainer.state.fn is not None
    name, fitting = STEPS[trainer.state.fn], trainer.state.fn == TrainerFn.FITTING
    loaders = twice_readable(trainer)
    if loaders is None:
        return None
    batch, _, _ = next(iter(loaders))
    loaders.reset()
    args = step_arguments(getattr(module, name), to_device(batch))
    sizes = microbatch_sizes(args[0], layout.num_microbatches, layout.pipeline_parallel_size) if args else [1]
    first = (split_batch(args[0], sizes)[0], *args[1:]) if args else ()
    compared = fitting and layout.tensor_parallel_size == 1  # in shards, sums and dropout are not the same to the bit
    with torch.set_grad_enabled(fitting):
        whole = observe(module, units, name, first, context=context, loss_of=loss_of, compared=compared)
    if mean and fitting and args:
        _warn_unless_mean(module, name, args, sizes, context)
    return whole


def _warn_unless_mean(
    module: LightningModule,
    step: str,
    args: tuple[Any, ...],
    sizes: list[int],
    context: Callable[[], AbstractContextManager[Any]],
) -> None:
    def loss(rows: Any, seed: int) -> float | None:
        seeds.restart_python(seed)
        seeds.restart(seed)
        with torch.no_grad(), LogTap(module).recording(Record()), context():
            value = loss_of(getattr(module, step)(rows, *args[1:]))
        return None if value is None else float(value)

    text = unlike_its_mean(loss, args[0], sizes)
    if text is not None:
        rank_zero_warn(f"pipeline_parallel_size cuts batches into microbatches, but {text}")


def twice_readable(trainer: Trainer) -> CombinedLoader | None:
    """The loaders of the loop that is about to run, if reading a batch takes nothing away from who reads later.

    They are asked for from where Lightning's loop gets them (read in lightning 2.6): what it does itself, it does with
    one batch read already.
    """
    source = _loop(trainer)._data_source
    if source.instance is None or not source.is_defined():
        return None
    loaders = source.dataloader()
    if not isinstance(loaders, CombinedLoader):
        fitting = trainer.state.fn == TrainerFn.FITTING
        loaders = CombinedLoader(loaders, "max_size_cycle" if fitting else "sequential")
    every = loaders.flattened
    maps = [isinstance(each, DataLoader) and not isinstance(each.dataset, IterableDataset) for each in every]
    return loaders if maps and all(maps) else None


def _loop(trainer: Trainer) -> Any:
    return {
        TrainerFn.FITTING: trainer.fit_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }[trainer.state.fn]  # type: ignore[index]


def first_batch(trainer: Trainer) -> Any:
    """The first batch of the loop that is about to run, from an iterator of its own."""
    loop = _loop(trainer)
    loop.setup_data()
    combined = loop._combined_loader
    try:
        batch, _, _ = next(iter(combined))
    finally:
        combined.reset()
        # the loop sets its data up anew: its iterator draws what one device would draw
        loop._combined_loader = loop._data_fetcher = None
    return batch


def step_arguments(step: Callable[..., Any], batch: Any) -> tuple[Any, ...]:
    """What Lightning would call `step` with: the batch, then indices as far as it takes them."""
    return (batch, 0, 0)[: len(inspect.signature(step).parameters)]
