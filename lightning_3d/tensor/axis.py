"""The tensor axis of sharded modules: a rank, a size and the collectives that they need.

`GroupAxis` uses a process group. A proof uses threads instead (`simulate.py`), so it proves the code that runs.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.activations.kept_results import kept_once
from lightning_3d.layout import TENSOR_AXIS


class ByteCounter(Protocol):
    """Counts bytes on the wire."""

    def add(self, axis: str, op: str, nbytes: int) -> None: ...


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
    """The tensor axis over a process group."""

    lazy = True

    def __init__(self, group: dist.ProcessGroup, ledger: ByteCounter | None = None) -> None:
        self.group, self.ledger = group, ledger
        self.rank, self.size = group.rank(), group.size()

    def __deepcopy__(self, memo: Any) -> "GroupAxis":
        return self  # a copied module has the same peers

    @kept_once
    def all_reduce(self, tensor: Tensor) -> Tensor:
        result = tensor.clone(memory_format=torch.contiguous_format)
        self._count("all_reduce", result, 2 / self.size)
        dist.all_reduce(result, group=self.group)
        return result

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        result = tensor.clone(memory_format=torch.contiguous_format)
        self._count("all_reduce", result, 2 / self.size)
        return _ending(dist.all_reduce(result, group=self.group, async_op=True), result)

    @kept_once
    def all_max(self, tensor: Tensor) -> Tensor:
        result = tensor.clone(memory_format=torch.contiguous_format)
        self._count("all_reduce", result, 2 / self.size)
        dist.all_reduce(result, dist.ReduceOp.MAX, group=self.group)
        return result

    @kept_once
    def all_gather(self, tensor: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        sizes = [math.prod(shape) for shape in shapes]
        padded = tensor.new_zeros(max(sizes))
        padded[: tensor.numel()] = tensor.reshape(-1)
        received = [torch.empty_like(padded) for _ in range(self.size)]
        self._count("all_gather", padded)
        dist.all_gather(received, padded, group=self.group)
        return [flat[:size].view(shape) for flat, size, shape in zip(received, sizes, shapes, strict=True)]

    @kept_once
    def reduce_scatter(self, tensors: list[Tensor]) -> Tensor:
        if _uneven(tensors):
            return self._own(self.all_reduce(_flat(tensors)), tensors)
        result = torch.empty_like(tensors[self.rank], memory_format=torch.contiguous_format)
        self._count("reduce_scatter", result)
        dist.reduce_scatter(result, [tensor.contiguous() for tensor in tensors], group=self.group)
        return result

    def begin_reduce_scatter(self, tensors: list[Tensor]) -> Callable[[], Tensor]:
        if _uneven(tensors):
            finish = self.begin_all_reduce(_flat(tensors))
            return lambda: self._own(finish(), tensors)
        result = torch.empty_like(tensors[self.rank], memory_format=torch.contiguous_format)
        self._count("reduce_scatter", result)
        shards = [tensor.contiguous() for tensor in tensors]
        return _ending(dist.reduce_scatter(result, shards, group=self.group, async_op=True), result)

    def _own(self, flat: Tensor, tensors: list[Tensor]) -> Tensor:
        return flat.split([tensor.numel() for tensor in tensors])[self.rank].view(tensors[self.rank].shape)

    def _count(self, op: str, tensor: Tensor, share: float = 1.0) -> None:
        """Count the bytes that a ring sends: `share` of `tensor` to each other rank."""
        if self.ledger is not None:
            sent = (self.size - 1) * tensor.numel() * tensor.element_size() * share
            self.ledger.add(TENSOR_AXIS, op, round(sent))


def _uneven(tensors: list[Tensor]) -> bool:
    """Return True if shards are uneven, which no reduce-scatter (Gloo, NCCL) takes."""
    return len({tensor.shape for tensor in tensors}) > 1


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _ending(work: dist.Work, result: Tensor) -> Callable[[], Tensor]:
    def finish() -> Tensor:
        work.wait()
        return result

    return finish
