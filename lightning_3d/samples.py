"""One batch through the whole module before it is placed: what each block is called with, and what comes out."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_3d import talk
from lightning_3d.early import optimizers_on_demand
from lightning_3d.errors import UnsupportedError, WritesError
from lightning_3d.layout import Layout
from lightning_3d.peek import first_batch, loaders_of, map_style
from lightning_3d.pipeline import seeds
from lightning_3d.pipeline.attributes import Attributes
from lightning_3d.pipeline.buffered import unlike_in_buffers
from lightning_3d.pipeline.buffers import undone
from lightning_3d.pipeline.kept import unlike_joined
from lightning_3d.pipeline.logs import LogTap
from lightning_3d.pipeline.means import Seen, unlike_its_mean
from lightning_3d.pipeline.microbatch import microbatch_sizes, split_batch, unshared
from lightning_3d.pipeline.records import Record
from lightning_3d.pipeline.rehearse import as_before
from lightning_3d.pipeline.step import loss_of
from lightning_3d.pipeline.whole import Whole, observe
from lightning_3d.tensor.quiet import Quiet
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
        with (
            seeds.set_aside(),
            as_before(module),
            optimizers_on_demand(module),
            writes_undone(module),
            LogTap(module).recording(Record()),
        ):
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
        cut = fitting and bool(args)  # evaluation runs whole batches
        sizes = microbatch_sizes(args[0], layout.num_microbatches, layout.pipeline_parallel_size) if cut else [1]
        pieces = split_batch(args[0], sizes) if args else []

        def run(rows: Any) -> None:
            with as_before(module), LogTap(module).recording(Record()), context():
                loss_of(getattr(module, name)(unshared(rows), *args[1:]))

        with torch.set_grad_enabled(fitting), _cut_as_rows(run, args, sizes, name):
            with as_before(module):
                first = (*pieces[:1], *args[1:])
                whole = observe(module, units, name, first, context=context, loss_of=loss_of, compared=fitting)
            for second in pieces[1:2]:  # what counts from the batch's start is right in the first
                run(second)
        if mean and fitting and args:
            _warn_unless_mean(module, name, args, sizes, context, whole)
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
            optimizers_on_demand(module),
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
    everyone = talk.gather(said)
    for answer in everyone:
        if isinstance(answer, UnsupportedError):
            raise answer
    if found is None or None in everyone:
        return None
    calls, read = everyone[0]
    return replace(found, calls=calls, read=read)  # all ranks must cut alike


@contextmanager
def _cut_as_rows(run: Callable[[Any], None], args: tuple[Any, ...], sizes: list[int], step: str) -> Iterator[None]:
    """Refuse the cut where what is inside fails on a microbatch, and `run` does not on the whole batch."""
    try:
        yield
    except UnsupportedError:
        raise
    except Exception as error:
        if len(sizes) == 1 or not _works(run, args[0]):
            raise
        raise UnsupportedError(
            f"{step} runs on a batch, and fails on one of the {len(sizes)} microbatches that a pipeline cuts it into"
            f" along dimension 0: {sizes[0]} of {sum(sizes)} rows ({type(error).__name__}: {error}). Something in the"
            " batch is not one row for each sample and belongs to all of them: targets of all samples in one tensor,"
            " offsets, the edges of a graph. num_microbatches=1 runs the whole batch at once."
        ) from error


def _works(run: Callable[[Any], None], batch: Any) -> bool:
    try:
        run(batch)
    except UnsupportedError:
        raise
    except Exception:
        return False
    return True


def _warn_unless_mean(
    module: LightningModule,
    step: str,
    args: tuple[Any, ...],
    sizes: list[int],
    context: Callable[[], AbstractContextManager[Any]],
    whole: Whole,
) -> None:
    watched, buffers = _of_the_last_block(module, whole.calls), [name for name, _ in module.named_buffers()]

    def loss(rows: Any, seed: int) -> Tensor | None:
        seeds.restart_python(seed)
        seeds.restart(seed)
        with LogTap(module).recording(Record()), Quiet(), context():  # what dropout adds would hide a difference
            return loss_of(getattr(module, step)(unshared(rows), *args[1:]))

    def look(rows: Any, seed: int) -> Seen | None:
        with Attributes(module).apart(), undone(module, buffers), only_trained(module, watched):
            value = loss(rows, seed)
            if value is None:
                return None
            reached = watched if value.requires_grad else []
            grads = torch.autograd.grad(value, reached, allow_unused=True) if reached else ()
        found = [grad.to_dense().flatten() for grad in grads if grad is not None]
        return Seen(float(value.detach()), torch.cat(found) if found else torch.empty(0))

    def number(rows: Any, seed: int) -> float | None:
        with torch.no_grad():
            value = loss(rows, seed)
        return None if value is None else float(value)

    def number_alone(rows: Any, seed: int) -> float | None:
        with Attributes(module).apart():
            return number(rows, seed)

    try:
        text = (
            unlike_its_mean(look, args[0], sizes, whole.rounding)
            or unlike_joined(module, number, args[0], sizes)
            or unlike_in_buffers(module, number_alone, args[0], sizes)
        )
    except RuntimeError:  # a step that differentiates cannot run without gradients; the cut is proven all the same
        return
    if text is not None:
        rank_zero_warn(f"pipeline_parallel_size cuts batches into microbatches, but {text}")


def _of_the_last_block(module: LightningModule, calls: Sequence[str]) -> list[nn.Parameter]:
    """Trained parameters of the last block that has any: the way back to it is short."""
    for unit in reversed(calls):
        if found := [item for item in module.get_submodule(unit).parameters() if item.requires_grad]:
            return found
    return []


@contextmanager
def only_trained(module: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """The others need no gradients, so that little of a forward is kept."""
    chosen = {id(item) for item in parameters}
    others = [item for item in module.parameters() if item.requires_grad and id(item) not in chosen]
    for item in others:
        item.requires_grad_(False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for item in others:
            item.requires_grad_(True)


def step_arguments(step: Callable[..., Any], batch: Any) -> tuple[Any, ...]:
    """What Lightning would call `step` with: the batch, then indices as far as it takes them."""
    return (batch, 0, 0)[: len(inspect.signature(step).parameters)]
