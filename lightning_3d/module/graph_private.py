"""Private parts of torch: the nodes of its graphs. Autograd's are read. Ours stand for collectives in compiled code.

Dynamo follows Python code. It would find the ledger and its lock in a collective, and end the graph there. It does not
look into an operation, which calls the axis when the graph runs. So bytes and waits are counted, and recompute takes
the results of the forward, as in code that is not compiled.

All ranks must call collectives in one order. Compilers move what depends on nothing, so operations are ordered.

Read in torch 2.11, 2.13, 2.14 and 2.15.
"""

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch.autograd.graph import Node
from torch.library import custom_op


def inputs_of(node: Node, counted: bool) -> list[tuple[Node, int]]:
    """The nodes before `node`, each with the number of values that it gives to `node`, 0 unless `counted`."""
    return [
        (before, math.prod(before._input_metadata[at].shape) if counted else 0)
        for before, at in node.next_functions
        if before is not None
    ]


def kind_of(node: Any) -> str:
    """The operation of a node, by the name of its class."""
    return type(node).__name__.rstrip("0123456789").removesuffix("Backward")


LAYOUT_KINDS = frozenset({
    "AccumulateGrad", "Add", "Addbmm", "Addmm", "Alias", "AsStrided", "Baddbmm", "Bmm", "Clone", "Expand", "Linear",
    "Mm", "Mv", "Permute", "ReshapeAlias", "Select", "Slice", "Squeeze", "T", "ToCopy", "Transpose", "UnsafeView",
    "Unsqueeze", "View",
})  # fmt: skip
"""Kinds of nodes that depend on the shapes of a batch: layouts, and products by several functions."""


def nodes_made() -> int:
    """The number of nodes that autograd has made on this thread; 0 in compiled code, whose graph the call would end."""
    return 0 if torch.compiler.is_compiling() else torch._C._autograd._get_sequence_nr()


def nodes_since(start: int, results: Iterable[Tensor]) -> tuple[set[Any], set[Any]]:
    """The nodes of `results` that were made after the first `start` ones, and those before, from which they begin."""
    made, before = set[Any](), set[Any]()
    waiting: list[Any] = [tensor.grad_fn for tensor in results]
    while waiting:
        node = waiting.pop()
        if node is None or node in made or node in before:
            continue
        if node._sequence_nr() < start or hasattr(node, "variable"):
            before.add(node)
        else:
            made.add(node)
            waiting += [each for each, _ in node.next_functions]
    return made, before


def graph_leaves(tensor: Tensor) -> list[Tensor]:
    """The leaves of autograd that `tensor` was computed from."""
    if tensor.grad_fn is None:
        return [tensor] if tensor.requires_grad else []
    found: dict[int, Tensor] = {}
    visited, todo = set[Any]({tensor.grad_fn}), [tensor.grad_fn]
    while todo:
        for node, _ in todo.pop().next_functions:
            if node is None or node in visited:
                continue
            visited.add(node)
            todo.append(node)
            if type(node).__name__ == "AccumulateGrad":
                found[id(node.variable)] = node.variable  # type: ignore[attr-defined]
    return list(found.values())


def labels_of(node: Any) -> Tensor | None:
    """The labels of a cross entropy; None for another node."""
    return getattr(node, "_saved_target", None) if node.name().startswith("NllLoss") else None


def factors_of(node: Any) -> list[tuple[int, ...]]:
    """The bytes of the number by which code multiplies or divides in a node; none where a device has it.

    They are read without an operation: in a mode of torch it would get a number of Python for such a tensor.
    """
    factor: Any = getattr(node, "_saved_other", None) if kind_of(node) in ("Mul", "Div") else None
    plain = type(factor) is Tensor and factor.is_cpu and not factor.dim() and factor.untyped_storage().nbytes() <= 8
    return [tuple(factor.untyped_storage())] if plain else []


def function_of(node: Any) -> type | None:
    """The function of Python that made a node; None for torch's own operations."""
    return getattr(node, "_forward_cls", None)


def function_module(node: Any) -> str:
    """The Python module of that function; "" for torch's own operations."""
    return getattr(function_of(node), "__module__", "")


def is_compiled_node(node: Any) -> bool:
    """Return True for a node of compiled code, which stands for any number of others."""
    return function_module(node).startswith("torch._functorch.")


def is_additive(node: Any) -> bool:
    """Return True if a function of autograd gives for every other element of a gradient, and for the rest, what it
    gives for all of them together. One that takes a norm does not."""
    shapes = [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in node._input_metadata]
    places = [torch.arange(1, 1 + each.numel(), device=each.device).view(each.shape) for each in shapes]
    whole = [place.sin().to(each.dtype) for place, each in zip(places, shapes, strict=True)]

    def given(tensors: list[Tensor]) -> list[Tensor]:
        found = node.apply(*tensors)
        return [each for each in (found if isinstance(found, tuple) else (found,)) if each is not None]

    with torch.no_grad():
        halves = [given([x * (at % 2 == odd) for x, at in zip(whole, places, strict=True)]) for odd in (0, 1)]
        pairs = zip(given(whole), *halves, strict=True)
        return all(torch.allclose(together, one + other, 1e-2, 1e-4) for together, one, other in pairs)


_axes: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The living axes by number, as a graph has numbers and tensors only."""


def number_of(axis: Any) -> int:
    """The lowest free number for a new `axis`. So compiled code of one fit also serves the next one."""
    number = next(number for number in itertools.count() if number not in _axes)
    _axes[number] = axis
    return number


def graph_node(node: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a collective of an axis: compiled code calls `node` with the number of the axis."""

    def decorate(collective: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(collective)
        def call(axis: Any, *args: Any) -> Any:
            return node(axis.number, *args) if torch.compiler.is_compiling() else collective(axis, *args)

        return call

    return decorate


@custom_op("lightning_3d::all_reduce", mutates_args=())
def all_reduce(axis: int, tensor: Tensor) -> Tensor:
    return _run(axis, "all_reduce", tensor)


@custom_op("lightning_3d::all_max", mutates_args=())
def all_max(axis: int, tensor: Tensor) -> Tensor:
    return _run(axis, "all_max", tensor)


@custom_op("lightning_3d::all_rows", mutates_args=())
def all_rows(axis: int, tensor: Tensor, most: int) -> Tensor:
    return _run(axis, "all_rows", tensor, most)


@custom_op("lightning_3d::reduce_scatter", mutates_args=())
def reduce_scatter(axis: int, tensors: Sequence[Tensor]) -> Tensor:
    return _run(axis, "reduce_scatter", list(tensors))


def _run(number: int, name: str, *args: Any) -> Any:
    """Call the collective itself: dynamo may compute a late tensor while it compiles."""
    axis = _axes[number]
    return getattr(type(axis), name).__wrapped__(axis, *args)


for operation in (all_reduce, all_max, all_rows, reduce_scatter):
    operation.register_effect(EffectType.ORDERED)


@all_reduce.register_fake
@all_max.register_fake
def _(axis: int, tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


@all_rows.register_fake
def _(axis: int, tensor: Tensor, most: int) -> Tensor:
    return tensor.new_empty(_axes[axis].size * most)


@reduce_scatter.register_fake
def _(axis: int, tensors: Sequence[Tensor]) -> Tensor:
    return torch.empty_like(tensors[_axes[axis].rank], memory_format=torch.contiguous_format)
