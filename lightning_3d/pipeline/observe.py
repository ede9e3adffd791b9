"""The run of the step on the uncut module: the order of its blocks, and the numbers that the cut must keep.

Once the module is cut, no rank can run all of it. What blocks pass on other than by arguments (a tensor stored on a
module, a hook inside a block) would be lost on every rank alike. So one microbatch runs before.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_3d.errors import UnsupportedError
from lightning_3d.layout import Layout
from lightning_3d.pipeline.backward import gradients_aside
from lightning_3d.pipeline.gates import Gates, hooked_inside
from lightning_3d.pipeline.loss_mean import warn_unless_mean
from lightning_3d.pipeline.microbatch import microbatch_sizes, split_batch
from lightning_3d.ranks import random_streams, talk
from lightning_3d.sandbox.fingerprint import Print, fingerprint, grad_print
from lightning_3d.sandbox.first_batch import STEPS, first_batch, loaders_of, map_style, step_arguments
from lightning_3d.sandbox.interceptor import Interceptor
from lightning_3d.sandbox.log_recorder import LogRecorder
from lightning_3d.sandbox.reads import NoteReads
from lightning_3d.sandbox.record import Record
from lightning_3d.sandbox.snapshot import changed, marks
from lightning_3d.sandbox.trees import loss_of, unshared
from lightning_3d.sandbox.trial import optimizers_on_demand, state_restored
from lightning_3d.sandbox.writes import RefuseWrites, writes_undone

Prints = list[Print]
_ROUNDING = 1e-3
"""Of fp32, and wherever hooks inside of blocks may take something: what is made of it is small (a router's loss), and
low precision rounds alike in the cut module and in the whole one, but for sums."""
_TRIALS = 8
"""Runs with other random numbers, where the code around the blocks draws any, to see if it chooses blocks by them."""


@dataclass(frozen=True)
class UncutRun:
    """The calls and the results of a step on one microbatch, on the uncut module."""

    step: str
    args: tuple[Any, ...]
    seed: int
    calls: tuple[str, ...]
    """Units in the order in which they were called."""
    read: tuple[str, ...]
    """Parameters of units that code outside of these units reads."""
    arguments: tuple[Prints, ...]
    """Of each call."""
    result: Prints
    grads: Mapping[str, Print]
    """Of each parameter that gets a gradient; empty where the step gives no loss to differentiate."""
    rounding: float
    """How far two computations of the same gradient may differ, relative to it."""
    buffers: Mapping[str, Prints]
    """Those that the step changes, as it leaves them."""
    compared: bool
    """True where the numbers are to be compared with those of the cut module."""


class Observer:
    """A `Director` of the uncut module: notes calls, and restarts random streams as the stages will."""

    skipping = False

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.calls: list[str] = []
        self.arguments: list[Prints] = []
        self.drawn = False
        """True where code between units drew random numbers."""
        self.state = self._state()

    def enter(self, unit: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.drawn = self.drawn or self.state != self._state()
        self.arguments.append(fingerprint((args, kwargs)))
        random_streams.restart(self.seed, 2 * len(self.calls))
        self.calls.append(unit)
        return args, kwargs

    def leave(self, unit: str, output: Any) -> Any:
        random_streams.restart(self.seed, 2 * len(self.calls) - 1)
        self.state = self._state()
        return output

    def foreign(self, unit: str, args: Any, kwargs: Any) -> Any:
        raise AssertionError("no unit is absent before the cut")

    def _state(self) -> tuple[Any, ...]:
        return bytes(torch.get_rng_state().numpy()), random.getstate()


def observe(
    module: Any,
    units: Sequence[str],
    step: str,
    args: tuple[Any, ...],
    *,
    context: Callable[[], AbstractContextManager[Any]],
    loss_of: Callable[[Any], Tensor | None],
    compared: bool,
) -> UncutRun:
    """Run `step` on the whole module and watch. Buffers and random streams must be put back by the caller.

    Args:
        units: names of the modules that a pipeline will place.
        context: entered around the step (autocast).
        loss_of: the loss in what the step returns.
        compared: also run the backward. It takes the memory of the whole module's gradients once.

    Raises `UnsupportedError` where the step chooses by random numbers which blocks to run.
    """
    seed = random_streams.draw()
    gates = Gates(module, units, ())
    inside = {item for unit in units for item in module.get_submodule(unit).parameters()}
    names = {item: (name,) for name, item in module.named_parameters() if item in inside}
    reads = NoteReads(names, lambda *_: gates.depth == 0)
    try:
        before = marks(module, [name for name, _ in module.named_buffers()])
        observer, output = _run(module, gates, step, args, context, seed, Interceptor(reads))
        buffers = {name: fingerprint(module.get_buffer(name)) for name in changed(module, before)}
        if observer.drawn:
            _refuse_random_order(module, gates, step, args, context, observer)
        result = fingerprint(output)
        loss = loss_of(output) if compared else None
        grads = _gradients(module, loss) if loss is not None and loss.requires_grad else {}
    finally:
        gates.remove()
    with context():
        rounding = _ROUNDING if hooked_inside(module, units) else _rounding(module)
    calls, arguments = tuple(observer.calls), tuple(observer.arguments)
    return UncutRun(step, args, seed, calls, tuple(reads.found), arguments, result, grads, rounding, buffers, compared)


def _run(
    module: Any, gates: Gates, step: str, args: tuple[Any, ...], context: Any, seed: int, notes: Any
) -> tuple[Observer, Any]:
    random_streams.restart_python(seed)
    random_streams.restart(seed, -1)
    observer = Observer(seed)
    with gates.directed(observer), LogRecorder(module, gates.inside_block).recording(Record()), notes, context():
        output = getattr(module, step)(*unshared(args))
    return observer, output


def _refuse_random_order(
    module: Any, gates: Gates, step: str, args: tuple[Any, ...], context: Any, observer: Observer
) -> None:
    for trial in range(1, _TRIALS):
        other, _ = _run(module, gates, step, args, context, observer.seed + trial, nullcontext())
        if other.calls != observer.calls:
            raise UnsupportedError(
                f"{step} draws at random which blocks to run: {len(observer.calls)} calls of blocks with one seed,"
                f" {len(other.calls)} with another, in another order. The stages of a pipeline must know what comes"
                " next. Draw inside of the block (return its input to skip it), or use pipeline_parallel_size=1."
            )


def _gradients(module: nn.Module, loss: Tensor) -> dict[str, Print]:
    named = dict(module.named_parameters())
    with gradients_aside(list(named.values())):
        torch.autograd.backward(loss)
        return {name: grad_print(item.grad) for name, item in named.items() if item.grad is not None}


def _rounding(module: nn.Module) -> float:
    device = next((parameter.device.type for parameter in module.parameters()), "cpu")
    low = {parameter.dtype for parameter in module.parameters()} & {torch.bfloat16, torch.float16}
    return 0.05 if low or torch.is_autocast_enabled(device) else _ROUNDING


_IN_PIECES = "which under a pipeline each microbatch would do, on a stage that may not have it"


def observe_one_batch(
    trainer: Trainer,
    module: LightningModule,
    units: Sequence[str],
    layout: Layout,
    to_device: Callable[[Any], Any],
    context: Callable[[], AbstractContextManager[Any]],
    mean: bool,
) -> UncutRun | None:
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

    def look() -> UncutRun | None:
        loaders = loaders_of(trainer)
        if not map_style(loaders):
            return None
        args = step_arguments(getattr(module, name), to_device(first_batch(loaders)))
        cut = fitting and bool(args)  # evaluation runs whole batches
        sizes = microbatch_sizes(args[0], layout.num_microbatches, layout.pipeline_parallel_size) if cut else [1]
        pieces = split_batch(args[0], sizes) if args else []

        def run(rows: Any) -> None:
            with state_restored(module), LogRecorder(module).recording(Record()), context():
                loss_of(getattr(module, name)(unshared(rows), *args[1:]))

        with torch.set_grad_enabled(fitting), _cut_as_rows(run, args, sizes, name):
            with state_restored(module):
                first = (*pieces[:1], *args[1:])
                whole = observe(module, units, name, first, context=context, loss_of=loss_of, compared=fitting)
            for second in pieces[1:2]:  # what counts from the batch's start is right in the first
                run(second)
        if mean and fitting and args:
            warn_unless_mean(module, name, args, sizes, context, whole.calls, whole.rounding)
        return whole

    return _on_every_rank(look, module, name)


def _on_every_rank(look: Callable[[], UncutRun | None], module: LightningModule, step: str) -> UncutRun | None:
    """What `look` finds, where it finds something on every rank. What one rank refuses, all refuse."""
    found: UncutRun | None = None
    said: Any = None
    try:
        with (
            random_streams.restored_streams(),
            state_restored(module),
            optimizers_on_demand(module),
            writes_undone(module),
            Interceptor(RefuseWrites(module.named_parameters, _IN_PIECES)),
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
