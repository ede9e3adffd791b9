"""Runs the step on the uncut module: the order of its blocks, and the numbers that the cut must keep.

Once the module is cut, no rank can run all of it. Blocks may exchange values in other ways than by arguments: a tensor
on a module, a hook inside a block. After the cut these are lost on every rank alike. So one microbatch runs before it.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_3d.errors import Lightning3DError, UnsupportedError
from lightning_3d.layout import Layout
from lightning_3d.module.undo import UndoStack
from lightning_3d.pipeline.backward import recomputes_reentrantly
from lightning_3d.pipeline.gates import Gates, hooked_inside
from lightning_3d.pipeline.loss_mean import (
    ROUNDING,
    UNSEEN,
    VERDICTS,
    LossMean,
    StepResult,
    compare_parts,
    find_mixing,
    norms_on_running_statistics,
    parameters_of_last_block,
    rounding_of,
    step_result,
    training_only,
)
from lightning_3d.pipeline.microbatch import TENSORS, Rows, microbatch_sizes, split_batch
from lightning_3d.pipeline.row_marks import CallMarks, row_marks
from lightning_3d.ranks import random_streams, talk
from lightning_3d.sandbox.fingerprint import Print, fingerprint, grad_print
from lightning_3d.sandbox.first_batch import STEPS, first_batch, loaders_of, map_style, promised_samples, step_arguments
from lightning_3d.sandbox.interceptor import Interceptor
from lightning_3d.sandbox.reads import NoteReads
from lightning_3d.sandbox.silence import SilenceRandom
from lightning_3d.sandbox.snapshot import changed, marks
from lightning_3d.sandbox.trees import leaves, loss_of, unshared
from lightning_3d.sandbox.trial import trial
from lightning_3d.sandbox.writes import RefuseWrites

Prints = list[Print]


@dataclass(frozen=True)
class UncutRun:
    """A run of a step on one microbatch, on the uncut module."""

    step: str
    args: tuple[Any, ...]
    seed: int
    calls: tuple[str, ...]
    """Units in the order in which they were called."""
    read: tuple[str, ...]
    """Parameters of units that code outside of these units reads."""
    arguments: tuple[Prints, ...]
    """Fingerprints of the arguments of each call."""
    result: Prints
    grads: Mapping[str, Print]
    """By parameter, for those with a gradient; empty where there is no loss to differentiate."""
    hooked: tuple[str, ...]
    """Modules inside of units that have a forward hook of the user or of a library."""
    rounding: float
    """Largest difference of two computations of the same gradient, relative to it."""
    buffers: Mapping[str, Prints]
    """Fingerprints of the buffers that the step changes, after the step."""
    compared: bool
    """True where the numbers are to be compared with those of the cut module."""
    drawn: bool = False
    """True where code between units drew random numbers."""
    loss_mean: LossMean = UNSEEN
    """The result of the test for a loss that is a mean over samples."""


class Observer:
    """A `Director` of the uncut module: records calls, and restarts random streams as the stages will."""

    skipping = False

    def __init__(self, seed: int, *, marked: bool = False) -> None:
        self.seed, self.marked = seed, marked
        self.calls: list[str] = []
        self.arguments: list[Prints] = []
        self.passed: set[nn.Parameter] = set()
        """Parameters among the arguments."""
        self.marks: list[CallMarks] = []
        """Of the outputs, if they are asked for."""
        self.drawn = False
        """True once code between units drew random numbers."""
        self.state = self._state()

    def enter(self, unit: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.drawn = self.drawn or self.state != self._state()
        self.passed.update(leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, nn.Parameter))
        self.arguments.append(fingerprint((args, kwargs)))
        random_streams.restart(self.seed, 2 * len(self.calls))
        self.calls.append(unit)
        return args, kwargs

    def leave(self, unit: str, output: Any) -> Any:
        if self.marked:
            self.marks.append(row_marks(output))
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
    """Run `step` on the uncut module in a trial, and observe it.

    Args:
        units: names of the modules that a pipeline will place.
        context: entered around the step (autocast).
        loss_of: takes the loss from what the step returns.
        compared: also run the backward. It takes the memory of the uncut module's gradients once.
    """
    seed = random_streams.draw()
    inside = {item for unit in units for item in module.get_submodule(unit).parameters()}
    names = {item: (name,) for name, item in module.named_parameters() if item in inside}
    with UndoStack() as undo:
        gates = Gates(module, units, (), undo)
        reads = NoteReads(names, lambda *_: gates.depth == 0)
        with trial(module, gradients=compared, optimizers=False, inside_block=gates.inside_block):
            before = marks(module, [name for name, _ in module.named_buffers()])
            with Interceptor(reads):
                observer, output = _run(module, gates, step, args, context, seed)
            hooked = tuple(hooked_inside(module, units))  # some are registered by the step
            buffers = {name: fingerprint(module.get_buffer(name)) for name in changed(module, before)}
            result = fingerprint(output)
            loss = loss_of(output) if compared else None
            grads = _gradients(module, loss) if loss is not None and loss.requires_grad else {}
    with context():
        rounding = ROUNDING if hooked else rounding_of(module)
    calls, arguments = tuple(observer.calls), tuple(observer.arguments)
    passed = sorted(name for item in observer.passed for name in names.get(item, ()))
    read = tuple(dict.fromkeys([*reads.found, *passed]))
    return UncutRun(
        step, args, seed, calls, read, arguments, result, grads, hooked, rounding, buffers,
        compared, observer.drawn,
    )  # fmt: skip


def _run(
    module: Any, gates: Gates, step: str, args: tuple[Any, ...], context: Any, seed: int, *, marked: bool = False
) -> tuple[Observer, Any]:
    random_streams.restart_python(seed)
    random_streams.restart(seed, -1)
    observer = Observer(seed, marked=marked)
    with gates.directed(observer), context():
        output = getattr(module, step)(*unshared(args))
    return observer, output


@dataclass
class _OtherRuns:
    """Runs of the step on parts of the batch and on all of it, without dropout and noise.

    Each has another seed than the first: the stages of a pipeline must know which block comes next, whatever is drawn.
    """

    module: Any
    uncut: UncutRun
    units: Sequence[str]
    context: Callable[[], AbstractContextManager[Any]]
    full_batch: Any
    on_full_batch: Callable[[], AbstractContextManager[Any]]
    """Entered around runs on the full batch."""
    failed: bool = False

    def __call__(self, rows: Any, seed: int, marked: bool) -> StepResult | None:
        args = (rows, *self.uncut.args[1:])
        parameters = parameters_of_last_block(self.module, self.uncut.calls)
        undo = UndoStack()
        gates = Gates(self.module, self.units, (), undo)
        around = self.on_full_batch if rows is self.full_batch else nullcontext
        try:
            with trial(self.module, gradients=True, optimizers=False), training_only(self.module, parameters):
                with around(), Interceptor(SilenceRandom()):
                    seed += self.uncut.seed
                    other, output = _run(self.module, gates, self.uncut.step, args, self.context, seed, marked=marked)
                result = step_result(loss_of(output), parameters, other.marks)
        except Lightning3DError:
            raise
        except Exception:  # code that needs real noise, or differentiates by other weights itself
            self.failed = True
            return None
        finally:
            undo.close()
        self._refuse_random_order(tuple(other.calls))
        return result

    def _refuse_random_order(self, calls: tuple[str, ...]) -> None:
        expected = self.uncut.calls
        if self.uncut.drawn and calls != expected:
            raise UnsupportedError(
                f"{self.uncut.step} draws at random which blocks to run: {len(expected)} calls of blocks with one seed,"
                f" {len(calls)} with another, in another order. The stages of a pipeline must know what comes next."
                " Draw inside of the block (return its input to skip it), or use pipeline_parallel_size=1."
            )


def _gradients(module: nn.Module, loss: Tensor) -> dict[str, Print]:
    """Fingerprints of the gradients. Each gradient is freed as soon as it is complete: all would double the peak."""
    found: dict[str, Print] = {}

    def note(name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            found[name], parameter.grad = grad_print(parameter.grad), None

    trained = [(name, item) for name, item in module.named_parameters() if item.requires_grad]
    complete = [] if recomputes_reentrantly([loss]) else trained  # such a checkpoint adds a gradient in several pieces
    handles = [item.register_post_accumulate_grad_hook(partial(note, name)) for name, item in complete]
    try:
        torch.autograd.backward(loss)
    finally:
        for handle in handles:
            handle.remove()
    for name, item in module.named_parameters():
        note(name, item)
    return found


_NO_MEAN = (
    ": it is no mean over samples (tokens that a mask leaves out unevenly, pairs of samples), so microbatches do not"
    " train exactly as one device does. loss_scope='auto' or 'batch' computes it on the full batch."
)
_NORMALIZES = (
    ": batch norm inside of blocks normalizes over the samples of a microbatch, so microbatches do not train exactly as"
    " one device does. num_microbatches=1 runs the full batch at once."
)
_IN_PIECES = "which under a pipeline each microbatch would do, on a stage that may not have it"


def observe_one_batch(
    trainer: Trainer,
    module: LightningModule,
    units: Sequence[str],
    layout: Layout,
    to_device: Callable[[Any], Any],
    context: Callable[[], AbstractContextManager[Any]],
    loss_scope: str,
    on_full_batch: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> UncutRun | None:
    """Observe the step that is about to run, on the first microbatch of its first batch, forward and backward.

    None where the batch cannot be read twice (a stream), or where the step fails on a rank. Then the pipeline learns
    the order of blocks from their declaration. Collective; an error of one rank is raised on all.

    Args:
        units: names of the modules that a pipeline will place.
        context: entered around a step (autocast).
        loss_scope: "microbatch" warns if the loss is no mean over samples.
        on_full_batch: entered around runs on the full batch.
    """
    assert trainer.state.fn is not None
    name, fitting = STEPS[trainer.state.fn], trainer.state.fn == TrainerFn.FITTING

    def observation() -> UncutRun | None:
        loaders = loaders_of(trainer)
        if not map_style(loaders):
            return None
        args = step_arguments(getattr(module, name), to_device(first_batch(loaders)))
        cut = fitting and bool(args)  # evaluation runs full batches
        rows = Rows.of(args[0], promised_samples(loaders), module) if cut else TENSORS
        sizes = microbatch_sizes(args[0], layout.num_microbatches, layout.pipeline_parallel_size, rows) if cut else [1]
        pieces = split_batch(args[0], sizes, rows) if args else []

        def run(rows: Any) -> None:
            with trial(module, gradients=fitting, optimizers=False), context():
                loss_of(getattr(module, name)(unshared(rows), *args[1:]))

        with _cut_as_rows(run, args, sizes, name):
            first = (*pieces[:1], *args[1:])
            uncut = observe(module, units, name, first, context=context, loss_of=loss_of, compared=fitting)
            others = _OtherRuns(module, uncut, units, context, args[0] if cut else None, on_full_batch)
            mean = _test_for_mean(others, args[0], sizes, rows, loss_scope) if cut else UNSEEN
            if not cut or others.failed:
                for second in pieces[1:2]:  # code that counts from the start of the batch is right in the first
                    run(second)
        return replace(uncut, loss_mean=mean)

    return _on_every_rank(observation, module, name)


def _test_for_mean(others: _OtherRuns, batch: Any, sizes: list[int], rows: Rows, loss_scope: str) -> LossMean:
    """Test that the loss is a mean over samples, without the batch norms of blocks if it is none with them.

    Those normalize over a microbatch wherever the loss is computed, so they do not decide about the loss.
    """
    if loss_scope == "batch" and (others.uncut.drawn or len(sizes) == 1):  # other numbers would look like other samples
        return UNSEEN
    if loss_scope == "batch":
        with norms_on_running_statistics(others.module, others.units):
            return find_mixing(others, batch, sizes, others.uncut.rounding, rows)
    mean = compare_parts(others, batch, sizes, others.uncut.rounding, rows)
    if mean.verdict != "no mean":
        return mean
    with norms_on_running_statistics(others.module, others.units) as frozen:
        alone = compare_parts(others, batch, sizes, others.uncut.rounding, rows) if frozen else mean
    because_of_norms = alone.verdict == "mean"
    if because_of_norms or loss_scope == "microbatch":
        why = _NORMALIZES if because_of_norms else _NO_MEAN
        rank_zero_warn(f"pipeline_parallel_size cuts batches into microbatches, but {mean.reason}{why}")
    return alone


def _on_every_rank(observation: Callable[[], UncutRun | None], module: LightningModule, step: str) -> UncutRun | None:
    """The result of `observation`, if it has one on every rank. An UnsupportedError of one rank is raised on all."""

    def leave_no_trace() -> UncutRun | None:
        try:
            refuse = Interceptor(RefuseWrites(module.named_parameters, _IN_PIECES))
            with trial(module, gradients=True, logs=False), refuse:
                return observation()
        except UnsupportedError:
            raise
        except Exception as error:
            rank_zero_warn(
                f"{step} could not be run on a microbatch ahead of training ({type(error).__name__}: {error}). Its"
                " blocks are taken to run in the order of their declaration, and to exchange values by their arguments"
                " only."
            )
            return None

    uncut = talk.together(leave_no_trace, UnsupportedError)
    mine = (uncut.calls, uncut.read, uncut.loss_mean) if uncut is not None else None
    if talk.all_equal(mine):
        return uncut
    seen = talk.gather(mine)
    found = [each for each in seen if each is not None]
    if uncut is None or len(found) < len(seen):
        return None
    calls, read, _ = found[0]  # all ranks must cut alike
    means = [mean for _, _, mean in found]
    worst = max(means, key=lambda mean: VERDICTS.index(mean.verdict))
    mixing = min((mean.mixing for mean in means if mean.mixing is not None), default=None)
    return replace(uncut, calls=calls, read=read, loss_mean=replace(worst, mixing=mixing))


@contextmanager
def _cut_as_rows(run: Callable[[Any], None], args: tuple[Any, ...], sizes: list[int], step: str) -> Iterator[None]:
    """Refuse the cut where the code inside fails on a microbatch, and `run` works on the full batch."""
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
            " offsets, the edges of a graph. num_microbatches=1 runs the full batch at once."
        ) from error


def _works(run: Callable[[Any], None], batch: Any) -> bool:
    try:
        run(batch)
    except UnsupportedError:
        raise
    except Exception:
        return False
    return True
