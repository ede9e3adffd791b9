"""Geometry of split tensors. Pure arithmetic on sizes, without process group or module.

A rank's shard is the concatenation, along one dimension, of one or more intervals of the full tensor. A plain column
split has one interval per rank. A fused q/k/v matrix has three (the r-th chunk of each section). By head: one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Interval = tuple[int, int]
"""Start and stop along the split dimension of the full tensor."""


@dataclass(frozen=True)
class TensorSplit:
    """Split of one tensor over the tensor ranks."""

    dim: int
    """The dimension that is divided."""
    pieces: tuple[tuple[Interval, ...], ...]
    """Intervals of the full tensor for each rank, in the order in which its shard has them."""

    @classmethod
    def even(
        cls, dim: int, size: int, ranks: int, sections: Sequence[int] | None = None, unit: int = 1
    ) -> "TensorSplit":
        """Chunks in rank order of each of `sections`, which add up to `size`, in multiples of `unit`."""
        pieces: list[list[Interval]] = [[] for _ in range(ranks)]
        start = 0
        for section in sections or (size,):
            for rank in range(ranks):
                low, high = chunk(section // unit, rank, ranks)
                pieces[rank].append((start + low * unit, start + high * unit))
            start += section
        return cls(dim=dim, pieces=tuple(tuple(piece) for piece in pieces))

    @property
    def ranks(self) -> int:
        return len(self.pieces)

    @property
    def sections(self) -> tuple[int, ...]:
        """Sizes of the sections of a fused matrix. One number where it is not fused."""
        count = max(len(piece) for piece in self.pieces)
        if any(len(piece) != count for piece in self.pieces):
            return (self.size,)
        return tuple(sum(piece[section][1] - piece[section][0] for piece in self.pieces) for section in range(count))

    @property
    def size(self) -> int:
        return max(stop for piece in self.pieces for _, stop in piece)

    def period(self) -> "TensorSplit | None":
        """The split of one row, where this split repeats it for several equal rows. Otherwise None."""
        count = len(self.pieces[0])
        row, first = self.size // count, TensorSplit(self.dim, tuple(piece[:1] for piece in self.pieces))
        starts = [row * number for number in range(count)]
        again = tuple(tuple((low + at, high + at) for at in starts for low, high in piece) for piece in first.pieces)
        return first if again == self.pieces and row * count == self.size else None

    def local_size(self, rank: int) -> int:
        return sum(stop - start for start, stop in self.pieces[rank])

    def boxes(self, rank: int) -> tuple[tuple[Interval, Interval], ...]:
        """Pairs (interval of the full tensor, interval of `rank`'s shard) along `dim`."""
        found, offset = [], 0
        for start, stop in self.pieces[rank]:
            found.append(((start, stop), (offset, offset + stop - start)))
            offset += stop - start
        return tuple(found)


def chunk(size: int, rank: int, ranks: int) -> Interval:
    """The `rank`-th of `ranks` chunks of `range(size)`, as DTensor cuts it.

    Where that would leave a rank with nothing, the chunks are nearly equal.
    """
    step = -(-size // ranks)
    if step * (ranks - 1) < size:
        return rank * step, min(size, (rank + 1) * step)
    short, longer = divmod(size, ranks)
    start = rank * short + min(rank, longer)
    return start, start + short + (rank < longer)


def local_part(full: Tensor, split: TensorSplit, rank: int) -> Tensor:
    """`rank`'s shard of `full`. A view where it is one interval, empty where it is none."""
    pieces = [full.narrow(split.dim, start, stop - start) for start, stop in split.pieces[rank] or ((0, 0),)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=split.dim)


def assemble(shards: Sequence[Tensor], split: TensorSplit) -> Tensor:
    """The full tensor, in source order, from the shards of all ranks."""
    shape = list(shards[0].shape)
    shape[split.dim] = split.size
    full = shards[0].new_empty(shape)
    for rank, shard in enumerate(shards):
        for (start, stop), (low, high) in split.boxes(rank):
            full.narrow(split.dim, start, stop - start).copy_(shard.narrow(split.dim, low, high - low))
    return full
