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
from torch import distributed as dist

from lightning_3d.errors import UnsupportedError, WritesError
from lightning_3d.layout import Layout
from lightning_3d.peek import first_batch, loaders_of, map_style
from lightning_3d.pipeline import seeds
from lightning_3d.pipeline.attributes import Attributes
from lightning_3d.pipeline.kept import unlike_joined
from lightning_3d.pipeline.logs import LogTap
from lightning_3d.pipeline.means import unlike_its_mean
from lightning_3d.pipeline.microbatch import microbatch_sizes, split_batch, unshared
from lightning_3d.pipeline.records import Record
from lightning_3d.pipeline.rehearse import as_before
from lightning_3d.pipeline.step import loss_of
from lightning_3d.pipeline.whole import Whole, observe
from lightning_3d.tensor.record import Recording, record_calls
from lightning_3d.tensor.units import find_units
from lightning_3d.writes import no_writes, writes_undone

STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}

_IN_PIECES = "which under a pipeline each microbatch would do, on a stage that may not have it"


def record_one_batch(trainer: Trainer, module: LightningModule, to_device: Callable[[Any], Any]) -> Recording | None:
    """Run the step that is about to run on its first batch, without gradients, and watch the blocks.

    Random streams, weights, buffers and plain attributes are as before afterwards and nothing is logged. None where
    there is no block to split, the batch would be lost to training or the step cannot be run by itself; then inputs are
    made up.
    """
    if not find_units(module) or not module.automatic_optimization:
        return None
    assert trainer.state.fn is not None
    step = getattr(module, STEPS[trainer.state.fn])
    try:
        with seeds.set_aside(), as_before(module), writes_undone(module), LogTap(module).recording(Record()):
            batch = to_device(first_batch(loaders_of(trainer)))
            return record_calls(module, lambda: step(*step_arguments(step, batch)))
    except WritesError:
        raise
    except Exception as error:
        warnings.warn(
            f"{STEPS[trainer.state.fn]} could not be run on one batch ahead of training"
            f" ({type(error).__name__}: {error}). What the blocks are called with is guessed from their sizes instead;"
            " blocks that take more than one tensor stay whole.",
            stacklevel=2,
        )
        return None


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
    assert trainer.state.fn is not None
    name, fitting = STEPS[trainer.state.fn], trainer.state.fn == TrainerFn.FITTING

    def look() -> Whole | None:
        loaders = loaders_of(trainer)
        if not map_style(loaders):
            return None
        args = step_arguments(getattr(module, name), to_device(first_batch(loaders)))
        sizes = microbatch_sizes(args[0], layout.num_microbatches, layout.pipeline_parallel_size) if args else [1]
        first = (split_batch(args[0], sizes)[0], *args[1:]) if args else ()
        with as_before(module), torch.set_grad_enabled(fitting):
            whole = observe(module, units, name, first, context=context, loss_of=loss_of, compared=fitting)
        if mean and fitting and args:
            _warn_unless_mean(module, name, args, sizes, context)
        return whole

    return _on_every_rank(look, module, name)


def _on_every_rank(look: Callable[[], Whole | None], module: LightningModule, step: str) -> Whole | None:
    """What `look` finds, where it finds something on every rank. What one rank refuses, all refuse."""
    found: Whole | None = None
    said: Any = None
    try:
        with (
            seeds.set_aside(),
            as_before(module),
            writes_undone(module),
            no_writes(module.named_parameters, _IN_PIECES),
        ):
            found = look()
        said = (found.calls, found.read) if found is not None else None
    except UnsupportedError as error:
        said = error
    except Exception as error:
        rank_zero_warn(
            f"{step} could not be run on a microbatch ahead of training ({type(error).__name__}: {error}). The order of"
            " its blocks is read from the code, and that they tell each other nothing beside their arguments is taken"
            " on trust."
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
            value = loss_of(getattr(module, step)(unshared(rows), *args[1:]))
        return None if value is None else float(value)

    def loss_alone(rows: Any, seed: int) -> float | None:
        with Attributes(module).apart():
            return loss(rows, seed)

    try:
        text = unlike_its_mean(loss_alone, args[0], sizes) or unlike_joined(module, loss, args[0], sizes)
    except RuntimeError:  # a step that differentiates cannot run without gradients; the cut is proven all the same
        return
    if text is not None:
        rank_zero_warn(f"pipeline_parallel_size cuts batches into microbatches, but {text}")


def step_arguments(step: Callable[..., Any], batch: Any) -> tuple[Any, ...]:
    """What Lightning would call `step` with: the batch, then indices as far as it takes them."""
    return (batch, 0, 0)[: len(inspect.signature(step).parameters)]
