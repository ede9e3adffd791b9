"""The axis of ranks that compute one block (tensor, context, experts): a `Group` whose results are new tensors.

A proof uses threads in place of the group (`simulate.py`), so it proves the code that runs.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from lightning_3d.activations.kept_results import kept_once
from lightning_3d.axes.group import Group
from lightning_3d.axes.ledger import Ledger
from lightning_3d.axes.ring_wire import RingWire
from lightning_3d.layout import TENSOR_AXIS
from lightning_3d.module import graph_private as graph_nodes
from lightning_3d.module.graph_private import graph_node, number_of


def peer_group(ranks: dist.ProcessGroup, ledger: Ledger | None, device_type: str, axis: str = TENSOR_AXIS) -> Group:
    """Ranks that compute one block together, on the tensor or the context axis. All of them must call this.

    CPU ranks of one machine then wait for no socket: shared memory takes a third of gloo's time for them.
    """
    wire = RingWire(ranks) if device_type == "cpu" else None
    return Group(ranks, axis, ledger, wire if wire is not None and wire.shared() else None)


class Axis:
    """The peers of a sharded module. Collectives return new tensors and leave their inputs unchanged.

    All gradients between `take` or `copy` and `gather` have the factor `weight`. It is the number of ranks where their
    partial gradients of a parameter are averaged and not summed.
    """

    def __init__(self, group: Group, *, weight: int = 1) -> None:
        self.group, self.rank, self.size, self.weight = group, group.rank, group.size, weight
        self.number = number_of(self)
        self.announced = False
        """True once the user knows what is gathered."""

    def __deepcopy__(self, memo: Any) -> "Axis":
        return self  # a copied module has the same peers

    @graph_node(graph_nodes.all_reduce)
    @kept_once
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, bitwise equal on each."""
        result = tensor.clone(memory_format=torch.contiguous_format)
        self.group.all_reduce(result)
        return result

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin the same and return a function that waits for the result."""
        result = tensor.clone(memory_format=torch.contiguous_format)
        return _ending(self.group.begin_all_reduce(result), result)

    @graph_node(graph_nodes.all_max)
    @kept_once
    def all_max(self, tensor: Tensor) -> Tensor:
        result = tensor.clone(memory_format=torch.contiguous_format)
        self.group.all_max(result)
        return result

    def all_gather(self, tensor: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """The tensors of all ranks, whose shapes are `shapes`."""
        sizes = [math.prod(shape) for shape in shapes]
        rows = self.all_rows(tensor, max(sizes)).view(self.size, -1)
        return [row[:size].view(shape) for row, size, shape in zip(rows, sizes, shapes, strict=True)]

    @graph_node(graph_nodes.all_rows)
    @kept_once
    def all_rows(self, tensor: Tensor, most: int) -> Tensor:
        """The elements of the tensors of all ranks in one buffer, with room for `most` of each."""
        own = tensor.reshape(-1)
        if own.numel() < most:
            own = F.pad(own, (0, most - own.numel()))
        rows = own.new_empty(self.size * most)
        self.group.all_gather(rows, own)
        return rows

    @kept_once
    def all_to_all(self, tensor: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """One buffer of what each rank sends here. `sends` has the elements for each rank, in the order of `tensor`."""
        result = tensor.new_empty(sum(receives))
        self.group.all_to_all(result, tensor, receives, sends)
        return result

    @graph_node(graph_nodes.reduce_scatter)
    @kept_once
    def reduce_scatter(self, tensors: list[Tensor]) -> Tensor:
        """The sum over the ranks of `tensors[rank]`."""
        if _uneven(tensors):
            return self._own(self.all_reduce(_flat(tensors)), tensors)
        shards = torch.cat(tensors).contiguous()  # images may have their channels last
        result = shards.new_empty(tensors[self.rank].shape)
        self.group.reduce_scatter(result, shards)
        return result

    def begin_reduce_scatter(self, tensors: list[Tensor]) -> Callable[[], Tensor]:
        """Begin the same and return a function that waits for the result."""
        if _uneven(tensors):
            finish = self.begin_all_reduce(_flat(tensors))
            return lambda: self._own(finish(), tensors)
        shards = torch.cat(tensors).contiguous()
        result = shards.new_empty(tensors[self.rank].shape)
        return _ending(self.group.begin_reduce_scatter(result, shards), result)

    def _own(self, flat: Tensor, tensors: list[Tensor]) -> Tensor:
        return flat.split([tensor.numel() for tensor in tensors])[self.rank].view(tensors[self.rank].shape)


def _ending(end: Callable[[], None], result: Tensor) -> Callable[[], Tensor]:
    def finish() -> Tensor:
        end()
        return result

    return finish


def _uneven(tensors: list[Tensor]) -> bool:
    """Return True if shards are uneven, which no reduce-scatter (Gloo, NCCL) takes."""
    return len({tensor.shape for tensor in tensors}) > 1


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
