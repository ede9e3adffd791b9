"""Our layers around the forward of a user's module. No other file sets a `forward`.

They are inside of the module's hooks, those of FSDP2 too, so they find gathered weights.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import update_wrapper
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from lightning_3d.errors import UnsupportedError
from lightning_3d.module.undo import Change, UndoStack


class Layer(IntEnum):
    """The order of layers, inner to outer. Of two layers of one rank, the later one is outside."""

    OWN = 0  # computes as the user's own forward, by other code: attention with open heads
    DATA = 1  # the same with statistics of all data ranks: batch norm
    SPLIT = 2  # computes in shards of the tensor axis
    EXPERTS = 3  # computes the experts of this rank, for the tokens of all
    CONTEXT = 4  # computes in parts of the sequence, of what tensor ranks share
    RECOMPUTE = 5  # a block is computed again as it was: in shards
    OFFLOAD = 6  # of a block that is computed again, only what enters it goes to the host
    LATE = 7  # leaves large logits to the loss, which computes them without the layers inside
    COMPARED = 8  # compares a part of the sequence with the whole; not where a block is computed again
    GATE = 9  # a pipeline decides first whether a unit computes here


_DIVIDED = {Layer.DATA, Layer.SPLIT, Layer.EXPERTS, Layer.CONTEXT, Layer.COMPARED}


class ForwardLayer:
    """A base class of layers. `add_layer` lets callers of `module` run `__call__`."""

    rank: Layer
    next: Callable[..., Any]
    """The forward inside of this one."""
    sums_gradients = True
    """False where gradients of whole weights, which ranks compute in parts, are summed over the data axis alone."""

    def __init_subclass__(cls, rank: Layer | None = None) -> None:
        if rank is not None:  # else that of the class above
            cls.rank = rank

    def __init__(self, module: nn.Module) -> None:
        self.module: Any = module


class _Entry(ForwardLayer):
    """The outer end of the layers. It stays where a library has put a forward of its own around it."""

    stack: "_Stack"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        called = self.module
        if not torch.compiler.is_compiling():
            frame = sys._getframe(1)
            if frame.f_code.co_filename == nn.modules.module.__file__:  # a copy of the module has its `forward` too
                called = frame.f_locals["self"]
        return (self.next if called is self.module else self.stack.of_copy(called))(*args, **kwargs)


class _Stack:
    """The layers of one module, inner to outer."""

    def __init__(self, module: nn.Module) -> None:
        # bound here: dynamo (torch 2.13) takes `type(module).forward.__get__(module)` for the layer that calls it
        self.own, self.layers, self.entry = module.forward, list[ForwardLayer](), _Entry(module)
        self.method = _as_method(self.entry, self.own)
        self.change = Change(module, "forward", self.method)

    def put(self, layers: list[ForwardLayer]) -> None:
        self.layers, forward = layers, self.own
        for layer in layers:
            layer.next, forward = forward, _as_method(layer, self.own)
        self.entry.stack, self.entry.next = self, forward
        if any(self.change.now() is each for each in (self.method, self.change.before)):  # else a library's is outside
            self.change.put(self.method if layers else self.change.before)

    def of_copy(self, copy: nn.Module) -> Callable[..., Any]:
        """The forward of a module that was given the attributes of ours, and so our layers: with weights of its own."""
        module = self.entry.module
        on_object = MethodType(type(module).forward, module) != self.own  # by the user: so it is on one device
        if on_object or [*map(id, copy.parameters())] == [*map(id, module.parameters())]:
            return self.entry.next
        if divided := [layer.rank.name.lower() for layer in self.layers if layer.rank in _DIVIDED]:
            raise UnsupportedError(
                f"The step calls a copy of a {type(module).__name__} that has weights of its own (a clone of"
                f" meta-learning, as by higher or learn2learn). Ranks divide what this module computes"
                f" ({', '.join(divided)}), and the copy would compute with the weights of the module. Call the module"
                " by torch.func.functional_call, or use zero_stage=0 with data ranks alone."
            )
        return MethodType(type(copy).forward, copy)


def add_layer(layer: ForwardLayer, undo: UndoStack) -> None:
    """Put `layer` on its module, at the place of its rank. `undo` reverts it."""
    stack = _stack_of(layer.module) or _Stack(layer.module)
    stack.put(sorted([*stack.layers, layer], key=lambda each: each.rank))
    undo.callback(lambda: stack.put([each for each in stack.layers if each is not layer]))


def ranks_of(module: nn.Module) -> list[Layer]:
    """The ranks of the layers on `module`, inner to outer."""
    stack = _stack_of(module)
    return [] if stack is None else [layer.rank for layer in stack.layers]


def is_plain(module: nn.Module, kind: type[nn.Module], up_to: Layer = Layer.SPLIT) -> bool:
    """Return True where `module` computes by `kind.forward`, with no layer up to this rank in its place."""
    stack = _stack_of(module)
    own = module.forward if stack is None else stack.own
    return MethodType(kind.forward, module) == own and all(rank > up_to for rank in ranks_of(module))


def sums_by_data(module: nn.Module) -> bool:
    """Return True where no layer on `module` sums gradients of whole weights over ranks."""
    stack = _stack_of(module)
    return stack is None or not any(layer.sums_gradients for layer in stack.layers if layer.rank == Layer.SPLIT)


@contextmanager
def without_layers(module: nn.Module) -> Iterator[None]:
    """Let the code inside call `module`, and what it contains, without our layers."""
    found = [(stack, stack.layers) for each in module.modules() if (stack := _stack_of(each)) is not None]
    for stack, _ in found:
        stack.put([])
    try:
        yield
    finally:
        for stack, layers in found:
            stack.put(layers)


def _stack_of(module: nn.Module) -> _Stack | None:
    entry = getattr(vars(module).get("forward"), "__self__", None)
    return entry.stack if isinstance(entry, _Entry) and entry.module is module else None


def _as_method(layer: ForwardLayer, own: Callable[..., Any]) -> MethodType:
    """`layer` as a method with the signature and the annotations of the user's `own` forward.

    Code chooses arguments by them. dynamo (torch 2.13) compares the code of a module's `forward` if that is a method.
    Otherwise it compares the object, so that blocks of one kind would not share a graph.
    """
    call: Any = type(layer).__call__
    function = FunctionType(call.__code__, call.__globals__, call.__name__, call.__defaults__, call.__closure__)
    update_wrapper(function, own, ["__annotations__"], [])  # not the name, by which a method is pickled
    try:
        signature = inspect.signature(own)
    except (ValueError, TypeError):
        return MethodType(function, layer)  # a builtin, or what is never called: geoopt's manifolds have NotImplemented
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [first, *signature.parameters.values()]
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return MethodType(function, layer)
