"""The tensor axis of sharded modules: a rank, a size and the collectives that they need.

`GroupAxis` uses a process group. A proof uses threads instead (`simulate.py`), so it proves the code that runs.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from lightning_3d.activations.kept_results import kept_once
from lightning_3d.axes.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from lightning_3d.axes.ring_wire import RingWire
from lightning_3d.layout import TENSOR_AXIS
from lightning_3d.ranks.groups import has_peers
from lightning_3d.ranks.named_range_private import named_range
from lightning_3d.tensor import graph_nodes_private as graph_nodes
from lightning_3d.tensor.graph_nodes_private import graph_node, number_of

ALL_REDUCE = f"all_reduce on {TENSOR_AXIS}"
ALL_GATHER = f"all_gather on {TENSOR_AXIS}"
REDUCE_SCATTER = f"reduce_scatter on {TENSOR_AXIS}"
"""Names of ranges in a trace."""
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Of one buffer: NCCL copies lists of tensors to one and back. Both were renamed in torch 2.13."""


class ByteCounter(Protocol):
    """Counts bytes on the wire, and seconds of waits for them."""

    def add(self, axis: str, op: str, nbytes: int) -> None: ...

    def waiting(self, reason: str) -> AbstractContextManager[None]: ...


class Axis(Protocol):
    """The peers of a sharded module. Collectives return new tensors and leave their inputs unchanged."""

    rank: int
    size: int
    lazy: bool
    """True where a sharded result may be gathered as late as on its first use."""

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum over the ranks, bitwise equal on each."""
        ...

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begin the same and return a function that waits for the result."""
        ...

    def all_max(self, tensor: Tensor) -> Tensor:
        """The largest over the ranks."""
        ...

    def all_gather(self, tensor: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """The tensors of all ranks, whose shapes are `shapes`."""
        ...

    def reduce_scatter(self, tensors: list[Tensor]) -> Tensor:
        """The sum over the ranks of `tensors[rank]`."""
        ...

    def begin_reduce_scatter(self, tensors: list[Tensor]) -> Callable[[], Tensor]:
        """Begin the same and return a function that waits for the result."""
        ...


class GroupAxis:
    """The tensor axis over a process group.

    Args:
        group: the peers.
        ledger: counts bytes and waits.
        wire: our ring over `group`. CPU ranks of one machine then wait for no socket: a layer's messages are short, and
            take a third of gloo's time through shared memory.
    """

    lazy = True

    def __init__(
        self, group: dist.ProcessGroup, ledger: ByteCounter | None = None, wire: RingWire | None = None
    ) -> None:
        self.group, self.ledger, self._wire = group, ledger, wire
        self.rank, self.size = group.rank(), group.size()
        self.number = number_of(self)

    def __deepcopy__(self, memo: Any) -> "GroupAxis":
        return self  # a copied module has the same peers

    @graph_node(graph_nodes.all_reduce)
    @kept_once
    def all_reduce(self, tensor: Tensor) -> Tensor:
        result = tensor.clone(memory_format=torch.contiguous_format)
        self._count("all_reduce", result, 2 / self.size)
        with named_range(ALL_REDUCE), self._waiting():
            if wire := self._shared(result):
                ring_all_reduce(result, wire)
            else:
                dist.all_reduce(result, group=self.group)
        return result

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        result = tensor.clone(memory_format=torch.contiguous_format)
        self._count("all_reduce", result, 2 / self.size)
        with named_range(ALL_REDUCE):
            work = dist.all_reduce(result, group=self.group, async_op=True)
        return self._ending(work, result, ALL_REDUCE)

    @graph_node(graph_nodes.all_max)
    @kept_once
    def all_max(self, tensor: Tensor) -> Tensor:
        result = tensor.clone(memory_format=torch.contiguous_format)
        self._count("all_reduce", result, 2 / self.size)
        with named_range(ALL_REDUCE), self._waiting():
            dist.all_reduce(result, dist.ReduceOp.MAX, group=self.group)
        return result

    def all_gather(self, tensor: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
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
        self._count("all_gather", own)
        with named_range(ALL_GATHER), self._waiting():
            if wire := self._shared(rows):
                ring_all_gather(rows, own, wire)
            else:
                _all_gather(rows, own, group=self.group)
        return rows

    @graph_node(graph_nodes.reduce_scatter)
    @kept_once
    def reduce_scatter(self, tensors: list[Tensor]) -> Tensor:
        if _uneven(tensors):
            return self._own(self.all_reduce(_flat(tensors)), tensors)
        shards = torch.cat(tensors).contiguous()  # images may have their channels last
        result = shards.new_empty(tensors[self.rank].shape)
        self._count("reduce_scatter", result)
        with named_range(REDUCE_SCATTER), self._waiting():
            if wire := self._shared(result):
                ring_reduce_scatter(result, shards, wire)
            else:
                _reduce_scatter(result, shards, group=self.group)
        return result

    def begin_reduce_scatter(self, tensors: list[Tensor]) -> Callable[[], Tensor]:
        if _uneven(tensors):
            finish = self.begin_all_reduce(_flat(tensors))
            return lambda: self._own(finish(), tensors)
        shards = torch.cat(tensors).contiguous()
        result = shards.new_empty(tensors[self.rank].shape)
        self._count("reduce_scatter", result)
        with named_range(REDUCE_SCATTER):
            work = _reduce_scatter(result, shards, group=self.group, async_op=True)
        return self._ending(work, result, REDUCE_SCATTER)

    def _own(self, flat: Tensor, tensors: list[Tensor]) -> Tensor:
        return flat.split([tensor.numel() for tensor in tensors])[self.rank].view(tensors[self.rank].shape)

    def _shared(self, tensor: Tensor) -> RingWire | None:
        """Return the ring if it passes through shared memory."""
        wire = self._wire if tensor.is_cpu and has_peers() else None
        return wire if wire is not None and wire.shared() else None

    def _count(self, op: str, tensor: Tensor, share: float = 1.0) -> None:
        """Count the bytes that a ring sends: `share` of `tensor` to each other rank."""
        if self.ledger is not None:
            sent = (self.size - 1) * tensor.numel() * tensor.element_size() * share
            self.ledger.add(TENSOR_AXIS, op, round(sent))

    def _waiting(self) -> AbstractContextManager[None]:
        return nullcontext() if self.ledger is None else self.ledger.waiting(TENSOR_AXIS)

    def _ending(self, work: dist.Work, result: Tensor, name: str) -> Callable[[], Tensor]:
        def finish() -> Tensor:
            with named_range(name), self._waiting():
                work.wait()
            return result

        return finish


def _uneven(tensors: list[Tensor]) -> bool:
    """Return True if shards are uneven, which no reduce-scatter (Gloo, NCCL) takes."""
    return len({tensor.shape for tensor in tensors}) > 1


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
