"""Where the pieces of a split tensor lie. Pure arithmetic on sizes: no process group, no module.

A rank's shard is the concatenation, along one dimension, of one or more intervals of the whole tensor. A plain column
split has one interval per rank; a fused q/k/v matrix has three (each section's r-th chunk); per-head interleaved
layouts have one again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Interval = tuple[int, int]
"""Start and stop along the split dimension of the whole tensor."""


@dataclass(frozen=True)
class TensorSplit:
    """How one tensor is divided over the tensor ranks."""

    dim: int
    """The dimension that is divided."""
    pieces: tuple[tuple[Interval, ...], ...]
    """For each rank its intervals of the whole tensor, in the order in which the shard holds them."""

    @classmethod
    def even(cls, dim: int, size: int, ranks: int, parts: Sequence[int] | None = None, unit: int = 1) -> "TensorSplit":
        """Chunks in rank order of each of `parts` (sections that add up to `size`), in multiples of `unit`."""
        sections = tuple(parts) if parts else (size,)
        pieces: list[list[Interval]] = [[] for _ in range(ranks)]
        start = 0
        for section in sections:
            for rank in range(ranks):
                low, high = chunk(section // unit, rank, ranks)
                pieces[rank].append((start + low * unit, start + high * unit))
            start += section
        return cls(dim=dim, pieces=tuple(tuple(piece) for piece in pieces))

    @property
    def ranks(self) -> int:
        return len(self.pieces)

    @property
    def parts(self) -> tuple[int, ...]:
        """Sizes of the sections of the fused matrix: one number where it is not fused."""
        count = max(len(piece) for piece in self.pieces)
        if any(len(piece) != count for piece in self.pieces):
            return (self.size,)
        return tuple(sum(piece[section][1] - piece[section][0] for piece in self.pieces) for section in range(count))

    @property
    def size(self) -> int:
        """Length of the whole tensor along `dim`."""
        return max(stop for piece in self.pieces for _, stop in piece)

    def period(self) -> "TensorSplit | None":
        """The split of one of several equal rows that this one repeats; None where it repeats nothing."""
        count = len(self.pieces[0])
        row, first = self.size // count, TensorSplit(self.dim, tuple(piece[:1] for piece in self.pieces))
        starts = [row * number for number in range(count)]
        again = tuple(tuple((low + at, high + at) for at in starts for low, high in piece) for piece in first.pieces)
        return first if again == self.pieces and row * count == self.size else None

    def local_size(self, rank: int) -> int:
        """Length of `rank`'s shard along `dim`."""
        return sum(stop - start for start, stop in self.pieces[rank])

    def boxes(self, rank: int) -> tuple[tuple[Interval, Interval], ...]:
        """(interval of the whole tensor, interval of `rank`'s shard) along `dim`, for each piece."""
        found, offset = [], 0
        for start, stop in self.pieces[rank]:
            found.append(((start, stop), (offset, offset + stop - start)))
            offset += stop - start
        return tuple(found)


def chunk(size: int, rank: int, ranks: int) -> Interval:
    """The `rank`-th of `ranks` parts of `range(size)`: as DTensor divides it, or, where that leaves a rank with
    nothing,
    nearly equal parts."""
    step = -(-size // ranks)
    if step * (ranks - 1) < size:
        return rank * step, min(size, (rank + 1) * step)
    short, longer = divmod(size, ranks)
    start = rank * short + min(rank, longer)
    return start, start + short + (rank < longer)


def local_part(whole: Tensor, split: TensorSplit, rank: int) -> Tensor:
    """`rank`'s shard of `whole`, as a view where it is one interval."""
    parts = [whole.narrow(split.dim, start, stop - start) for start, stop in split.pieces[rank]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=split.dim)


def assemble(shards: Sequence[Tensor], split: TensorSplit) -> Tensor:
    """The whole tensor, in source order, from every rank's shard."""
    shape = list(shards[0].shape)
    shape[split.dim] = split.size
    whole = shards[0].new_empty(shape)
    for rank, shard in enumerate(shards):
        for (start, stop), (low, high) in split.boxes(rank):
            whole.narrow(split.dim, start, stop - start).copy_(shard.narrow(split.dim, low, high - low))
    return whole
