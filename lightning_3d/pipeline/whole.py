"""The step on the whole module, before it is cut: the order of its blocks, and the numbers that the cut must keep.

Once the module is cut, no rank can run all of it, and what blocks tell each other beside their arguments (a tensor kept
on a module, a hook inside a block) is lost on every rank alike. So one microbatch goes through the module before.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_3d.errors import UnsupportedError
from lightning_3d.pipeline import seeds
from lightning_3d.pipeline.backward import grads_aside
from lightning_3d.pipeline.buffers import changed, marks
from lightning_3d.pipeline.gates import Gates, hooked_inside
from lightning_3d.pipeline.logs import LogTap
from lightning_3d.pipeline.microbatch import leaves, unshared
from lightning_3d.pipeline.prints import Print, fingerprint, grad_print
from lightning_3d.pipeline.records import Record

Prints = list[Print]
_ROUNDING = 1e-3
"""Of fp32, and wherever hooks inside of blocks may take something: what is made of it is small (a router's loss), and
low precision rounds alike in the cut module and in the whole one, but for sums."""
_TRIALS = 8
"""Runs with other random numbers, where the code around the blocks draws any, to see if it chooses blocks by them."""


@dataclass(frozen=True)
class Whole:
    """What a step does with one microbatch on the whole module."""

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
    """Whether the numbers are to be compared with those of the cut module."""


class Observer:
    """A `Director` of the uncut module: notes calls, and restarts random streams as the stages will."""

    skipping = False

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.calls: list[str] = []
        self.arguments: list[Prints] = []
        self.drawn = False
        """Whether code between units drew random numbers."""
        self.state = self._state()

    def enter(self, unit: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        self.drawn = self.drawn or self.state != self._state()
        self.arguments.append(fingerprint((args, kwargs)))
        seeds.restart(self.seed, 2 * len(self.calls))
        self.calls.append(unit)
        return args, kwargs

    def leave(self, unit: str, output: Any) -> Any:
        seeds.restart(self.seed, 2 * len(self.calls) - 1)
        self.state = self._state()
        return output

    def foreign(self, unit: str, args: Any, kwargs: Any) -> Any:
        raise AssertionError("no unit is absent before the cut")

    def _state(self) -> tuple[Any, ...]:
        return bytes(torch.get_rng_state().numpy()), random.getstate()


class _Reads(TorchFunctionMode):
    """Notes parameters of units that are used while no unit runs. Asking for their shape or dtype is no use."""

    def __init__(self, module: nn.Module, units: Sequence[str], gates: Gates) -> None:
        super().__init__()
        self.gates, self.found = gates, dict[str, None]()
        inside = {id(item) for unit in units for item in module.get_submodule(unit).parameters()}
        self.names = {id(item): name for name, item in module.named_parameters() if id(item) in inside}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.gates.depth == 0 and any(isinstance(leaf, Tensor | float) for leaf in leaves(result)):
            for leaf in leaves((args, kwargs or {})):
                if isinstance(leaf, nn.Parameter) and id(leaf) in self.names:
                    self.found[self.names[id(leaf)]] = None
        return result


def observe(
    module: Any,
    units: Sequence[str],
    step: str,
    args: tuple[Any, ...],
    *,
    context: Callable[[], AbstractContextManager[Any]],
    loss_of: Callable[[Any], Tensor | None],
    compared: bool,
) -> Whole:
    """Run `step` on the whole module and watch. Buffers and random streams must be put back by the caller.

    Args:
        units: names of the modules that a pipeline will place.
        context: entered around the step (autocast).
        loss_of: the loss in what the step returns.
        compared: also run the backward. It takes the memory of the whole module's gradients once.

    Raises `UnsupportedError` where the step chooses by random numbers which blocks to run.
    """
    seed = seeds.draw()
    gates = Gates(module, units, ())
    reads = _Reads(module, units, gates)
    try:
        before = marks(module, [name for name, _ in module.named_buffers()])
        observer, output = _run(module, gates, step, args, context, seed, reads)
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
    return Whole(step, args, seed, calls, tuple(reads.found), arguments, result, grads, rounding, buffers, compared)


def _run(
    module: Any, gates: Gates, step: str, args: tuple[Any, ...], context: Any, seed: int, mode: Any
) -> tuple[Observer, Any]:
    seeds.restart_python(seed)
    seeds.restart(seed, -1)
    observer = Observer(seed)
    with gates.directed(observer), LogTap(module, gates).recording(Record()), mode, context():
        output = getattr(module, step)(*unshared(args))
    return observer, output


def _refuse_random_order(
    module: Any, gates: Gates, step: str, args: tuple[Any, ...], context: Any, observer: Observer
) -> None:
    for trial in range(1, _TRIALS):
        other, _ = _run(module, gates, step, args, context, observer.seed + trial, _Nothing())
        if other.calls != observer.calls:
            raise UnsupportedError(
                f"{step} draws at random which blocks to run: {len(observer.calls)} calls of blocks with one seed,"
                f" {len(other.calls)} with another, in another order. The stages of a pipeline must know what comes"
                " next. Draw inside of the block (return its input to skip it), or use pipeline_parallel_size=1."
            )


class _Nothing(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _gradients(module: nn.Module, loss: Tensor) -> dict[str, Print]:
    named = dict(module.named_parameters())
    with grads_aside(list(named.values())):
        torch.autograd.backward(loss)
        return {name: grad_print(item.grad) for name, item in named.items() if item.grad is not None}


def _rounding(module: nn.Module) -> float:
    device = next((parameter.device.type for parameter in module.parameters()), "cpu")
    low = {parameter.dtype for parameter in module.parameters()} & {torch.bfloat16, torch.float16}
    return 0.05 if low or torch.is_autocast_enabled(device) else _ROUNDING
