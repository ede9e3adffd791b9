"""The collectives of an axis as operations of torch: compiled code has each as one node of its graph.

Dynamo follows Python code. It would find the ledger and its lock in a collective, and end the graph there. It does not
look into an operation, which calls the axis when the graph runs. So bytes and waits are counted, and recompute takes
the results of the forward, as in code that is not compiled.

All ranks must call their collectives in one order, and compilers move what depends on nothing. So the operations are
registered as ordered (private, read in torch 2.13).
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch.library import custom_op

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
    result: Tensor = _run(axis, "all_reduce", tensor)
    return result


@custom_op("lightning_3d::all_max", mutates_args=())
def all_max(axis: int, tensor: Tensor) -> Tensor:
    result: Tensor = _run(axis, "all_max", tensor)
    return result


@custom_op("lightning_3d::all_rows", mutates_args=())
def all_rows(axis: int, tensor: Tensor, most: int) -> Tensor:
    result: Tensor = _run(axis, "all_rows", tensor, most)
    return result


@custom_op("lightning_3d::reduce_scatter", mutates_args=())
def reduce_scatter(axis: int, tensors: Sequence[Tensor]) -> Tensor:
    result: Tensor = _run(axis, "reduce_scatter", list(tensors))
    return result


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
