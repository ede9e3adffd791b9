"""The boxes of a tensor that a rank has: arithmetic on sizes. `describe` reads them off a live tensor.

No other file of this folder knows how a parallelism divides a tensor.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_3d.layout import EXPERT_AXIS, TENSOR_AXIS
from lightning_3d.ranks.shards import sharded_axes
from lightning_3d.tensor.geometry import TensorSplit

Interval = tuple[int, int]
"""Start and stop along one dimension."""


@dataclass(frozen=True)
class Piece:
    """A box of a full tensor, and its place on a rank."""

    offset: tuple[int, ...]
    """Corner of the box in the full tensor."""
    size: tuple[int, ...]
    """Its extent along each dimension."""
    local: tuple[int, ...]
    """Corner of the box in the shard of the rank."""

    @property
    def elements(self) -> int:
        return prod(self.size)

    def overlap(self, other: "Piece") -> "Piece | None":
        """The common box of `self` and `other`, at its place in the local tensor of `self`."""
        low = tuple(map(max, self.offset, other.offset))
        high = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.size, other.offset, other.size, strict=True)
        )
        if any(stop <= start for start, stop in zip(low, high, strict=True)):
            return None
        return Piece(
            offset=low,
            size=tuple(stop - start for start, stop in zip(low, high, strict=True)),
            local=tuple(at + start - mine for at, start, mine in zip(self.local, low, self.offset, strict=True)),
        )


@dataclass(frozen=True)
class Placement:
    """The part of one tensor that one rank has.

    It begins as the full tensor. `split` and `chunk` narrow it, in the order in which the parallelisms were applied.
    """

    shape: tuple[int, ...]
    """Of the full tensor."""
    pieces: tuple[Piece, ...]
    """The boxes of this rank; none where another pipeline stage owns the tensor."""
    local_shape: tuple[int, ...]
    """Of the part that this rank has."""

    @classmethod
    def full(cls, shape: Sequence[int]) -> "Placement":
        size, corner = tuple(shape), (0,) * len(shape)
        pieces = (Piece(offset=corner, size=size, local=corner),) if prod(size) else ()
        return cls(shape=size, pieces=pieces, local_shape=size)

    @classmethod
    def nothing(cls, shape: Sequence[int]) -> "Placement":
        """No part of a tensor that other ranks have."""
        return cls(shape=tuple(shape), pieces=(), local_shape=tuple(shape))

    def split(self, dim: int, intervals: Iterable[tuple[Interval, Interval]]) -> "Placement":
        """Keep, along `dim`, each (interval of the old part, interval of the new part)."""
        kept: list[Piece] = []
        length = 0
        for (start, stop), (low, high) in intervals:
            kept += [moved for piece in self.pieces if (moved := _narrow(piece, dim, start, stop, low)) is not None]
            length = max(length, high)
        return Placement(shape=self.shape, pieces=tuple(kept), local_shape=_with(self.local_shape, dim, length))

    def chunk(self, dim: int, rank: int, ranks: int) -> "Placement":
        """Keep the `rank`-th of `ranks` chunks along `dim`, as `torch.chunk` divides."""
        total = self.local_shape[dim]
        step = -(-total // ranks)
        start, stop = min(total, rank * step), min(total, (rank + 1) * step)
        return self.split(dim, [((start, stop), (0, stop - start))])


def _narrow(piece: Piece, dim: int, start: int, stop: int, low: int) -> Piece | None:
    """The part of `piece` whose local coordinates along `dim` are in [start, stop), moved to `low`."""
    begin = max(start, piece.local[dim])
    end = min(stop, piece.local[dim] + piece.size[dim])
    if end <= begin:
        return None
    return Piece(
        offset=_with(piece.offset, dim, piece.offset[dim] + begin - piece.local[dim]),
        size=_with(piece.size, dim, end - begin),
        local=_with(piece.local, dim, low + begin - start),
    )


def _with(numbers: tuple[int, ...], dim: int, number: int) -> tuple[int, ...]:
    return (*numbers[:dim], number, *numbers[dim + 1 :])


def box(offset: Sequence[int], size: Sequence[int]) -> tuple[slice, ...]:
    """To index a tensor with."""
    return tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))


def overlaps(held: Iterable[Piece], wanted: Iterable[Piece]) -> Iterator[tuple[Piece, Piece]]:
    """For each common box: its place in the tensor of `held`, and in the tensor of `wanted`."""
    wanted = tuple(wanted)
    for source in held:
        for target in wanted:
            common, there = source.overlap(target), target.overlap(source)
            if common is not None and there is not None:
                yield common, there


Splits = Callable[[Tensor], TensorSplit | None]
"""The division of a parameter among tensor ranks, or of experts; None without one."""
_FIRST = (TENSOR_AXIS, EXPERT_AXIS)
"""Axes that divide a parameter before its rows are divided."""


def describe(tensor: Tensor, split: TensorSplit | None = None) -> Placement:
    """The placement of `tensor` on this rank: chunks by tensor rank or experts first, then rows by data rank."""
    if tensor.is_meta:
        return Placement.nothing(tensor.shape)
    placement = Placement.full(tensor.shape)
    if not isinstance(tensor, DTensor):
        return placement
    mesh = tensor.device_mesh
    for name, (axis, how) in sorted(sharded_axes(tensor).items(), key=lambda each: each[0] not in _FIRST):
        rank, ranks, dim = mesh.get_local_rank(axis), mesh.size(axis), int(getattr(how, "dim"))  # noqa: B009
        if name in _FIRST and split is not None:
            placement = placement.split(split.dim, split.boxes(rank))
        else:
            placement = placement.chunk(dim, rank, ranks)
    assert placement.local_shape == tuple(tensor.to_local().shape), (placement, tensor.to_local().shape)
    return placement
