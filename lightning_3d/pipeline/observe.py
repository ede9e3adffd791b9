"""Runs the step on the uncut module: the order of its blocks, and the numbers that the cut must keep.

Once the module is cut, no rank can run all of it. Blocks may exchange values in other ways than by arguments: a tensor
on a module, a hook inside a block. After the cut these are lost on every rank alike. So one microbatch runs before it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.errors import NO_PIPELINE, UnsupportedError
from lightning_3d.module.undo import UndoStack
from lightning_3d.pipeline.backward import names_of_mixing, recomputes_reentrantly, users_functions
from lightning_3d.pipeline.gates import Gates, hooked_inside
from lightning_3d.pipeline.loss_mean import UNSEEN, LossMean, rounding_of
from lightning_3d.pipeline.microbatch import Rows
from lightning_3d.pipeline.row_marks import CallMarks, Given, row_marks, shapes_of
from lightning_3d.ranks import random_streams
from lightning_3d.ranks.random_streams import drawn_from
from lightning_3d.sandbox.fingerprint import Print, fingerprint, grad_print
from lightning_3d.sandbox.interceptor import Interceptor, NoteAsked
from lightning_3d.sandbox.log_recorder import LogRecorder
from lightning_3d.sandbox.record import Record
from lightning_3d.sandbox.snapshot import changed, marks
from lightning_3d.sandbox.trees import leaves, loss_of, unshared
from lightning_3d.sandbox.trial import holders, own_states, trial
from lightning_3d.sandbox.writes import NoteReads

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
    batch: tuple[Any, ...] = ()
    """The arguments of the step on the full batch; none in an evaluation."""
    drawn: bool = False
    """True where code between units drew random numbers."""
    gradients: tuple[tuple[str, int | None], ...] = ()
    """Places where code puts a hook on a tensor's gradient, and how many blocks were called before; None inside one."""
    loss_mean: LossMean = UNSEEN
    """The result of the test for a loss that is a mean over samples."""
    alike: tuple[tuple[Any, ...], ...] = ()
    """Arguments of a first and of a second step, of one shape; none in an evaluation."""
    pieces: int | None = None
    """Microbatches of the batch."""
    rows: Rows | None = None
    """The places of its samples."""


class Observer:
    """A `Director` of the uncut module: records calls, and restarts random streams as the stages will."""

    skipping = False

    def __init__(self, seed: int, *, marked: bool = False) -> None:
        self.seed, self.marked = seed, marked
        self.calls: list[str] = []
        self.given: list[Given] = []
        self.passed: set[nn.Parameter] = set()
        """Parameters among the arguments."""
        self.marks: list[CallMarks] = []
        """Of the outputs, if they are asked for."""
        self.drawn = self.drawn_inside = False
        """Whether a stream has moved between blocks, and torch's within one."""
        self.state = self.begun = self._state()

    def enter(self, unit: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.drawn = self.drawn or self.state != self._state()
        self.passed.update(leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, nn.Parameter))
        self.given.append(Given(shapes_of((args, kwargs)), fingerprint((args, kwargs))))
        random_streams.restart(self.seed, 2 * len(self.calls))
        self.calls.append(unit)
        return args, kwargs

    def leave(self, unit: str, output: Any) -> Any:
        if self.marked:
            self.marks.append(row_marks(output))
        self.drawn_inside = self.drawn_inside or random_streams.drawn_since_restart()
        random_streams.restart(self.seed, 2 * len(self.calls) - 1)
        self.state = self._state()
        return output

    def foreign(self, unit: str, args: Any, kwargs: Any) -> Any:
        raise AssertionError("no unit is absent before the cut")

    def plain(self) -> int:
        """A number for what Python's and numpy's streams have given, 0 for nothing."""
        state = self._state()[1]
        return 0 if state == self.begun[1] else state

    def _state(self) -> tuple[bytes, int]:
        return bytes(torch.get_rng_state().numpy()), random_streams.plain_print()


def called(gates: Gates) -> int | None:
    """The number of blocks that an observed step has called so far, None inside of one."""
    director = gates.director
    return len(director.calls) if isinstance(director, Observer) and not gates.depth else None


def observe(
    module: Any,
    units: Sequence[str],
    step: str,
    args: tuple[Any, ...],
    *,
    context: Callable[[], AbstractContextManager[Any]],
    compared: bool,
    seed: int,
) -> UncutRun:
    """Run `step` on the uncut module in a trial, and observe it. Where `compared`, also run the backward, which takes
    the memory of the uncut module's gradients once.
    """
    inside = {item for unit in units for item in module.get_submodule(unit).parameters()}
    names = {item: (name,) for name, item in module.named_parameters() if item in inside}
    with UndoStack() as undo:
        gates = Gates(module, units, (), undo)
        reads = NoteReads(names, lambda *_: gates.depth == 0)
        logs = LogRecorder(module, gates.inside_block).recording(Record(), own_metrics=True)
        with trial(module, gradients=compared, logs=False), logs:
            before = marks(module, [name for name, _ in module.named_buffers()])
            states = own_states(holders(module.modules()))
            hooks = NoteAsked(("hook",), lambda call, _: (call.place, called(gates)))
            with Interceptor(reads, hooks):
                observer, output = run_step(module, gates, step, args, context, (seed, seed), False)
            if drawn_from(states):
                raise UnsupportedError(
                    f"{step} draws from a random generator of its own (of a module, class or file). Under a pipeline"
                    " each stage runs a part of the step, and would draw fewer numbers than another. Draw from torch's"
                    f" default generator, which the stages restart alike, or use {NO_PIPELINE}."
                )
            hooked = tuple(hooked_inside(module, units))  # some are registered by the step
            buffers = {name: fingerprint(module.get_buffer(name)) for name in changed(module, before)}
            result = fingerprint(output)
            loss = loss_of(output) if compared else None
            nodes = [] if loss is None else users_functions([loss])
            grads = _gradients(module, loss, bool(nodes)) if loss is not None and loss.requires_grad else {}
            functions = [(f"the backward of {name}", None) for name in names_of_mixing(nodes)]
    rounding = rounding_of(module, hooked, context)
    calls, arguments = tuple(observer.calls), tuple(each.prints for each in observer.given)
    passed = sorted(name for item in observer.passed for name in names.get(item, ()))
    read = tuple(dict.fromkeys([*reads.found, *passed]))
    return UncutRun(
        step, args, seed, calls, read, arguments, result, grads, hooked, rounding, buffers,
        compared, (), observer.drawn, tuple(dict.fromkeys([*hooks.found, *functions])),
    )  # fmt: skip


def run_step(
    module: Any, gates: Gates, step: str, args: tuple[Any, ...], context: Any, seeds: tuple[int, int], marked: bool
) -> tuple[Observer, Any]:
    """Run `step` under an observer, with one of `seeds` for torch and one for Python; returns it and the output."""
    random_streams.restart_python(seeds[1])
    random_streams.restart(seeds[0], -1)
    observer = Observer(seeds[0], marked=marked)
    with gates.directed(observer), context():
        output = getattr(module, step)(*unshared(args))
    return observer, output


def _gradients(module: nn.Module, loss: Tensor, again: bool) -> dict[str, Print]:
    """Fingerprints of the gradients. Each gradient is freed as soon as it is complete: all would double the peak."""
    found: dict[str, Print] = {}

    def note(name: str, parameter: Tensor) -> None:
        if parameter.grad is not None:
            found[name], parameter.grad = grad_print(parameter.grad), None

    trained = [(name, item) for name, item in module.named_parameters() if item.requires_grad]
    complete = [] if recomputes_reentrantly([loss]) else trained  # such a checkpoint adds a gradient in several pieces
    with ExitStack() as stack:
        for name, item in complete:
            stack.callback(item.register_post_accumulate_grad_hook(partial(note, name)).remove)
        torch.autograd.backward(loss, retain_graph=again)
    for name, item in module.named_parameters():
        note(name, item)
    return found
