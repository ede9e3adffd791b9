"""The exchange of heads: each rank gets all positions of some heads, and gives away the other heads of its part.

`to_heads` and `to_positions` are each the backward of the other. One message carries all tensors: their heads lie side
by side as one row of features for each position.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.geometry import TensorSplit

Way = Callable[[Sequence[Tensor], Axis, TensorSplit], tuple[Tensor, ...]]
HEADS, POSITIONS = -3, -2
"""Dimensions of queries, keys and values."""


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: Way, axis: Axis, split: TensorSplit, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back, ctx.axis, ctx.split = _to_positions if way is _to_heads else _to_heads, axis, split
        return way(tensors, axis, split)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, *_exchanged(ctx.back, grads, ctx.axis, ctx.split)


def _exchanged(way: Way, tensors: Sequence[Tensor], axis: Axis, split: TensorSplit) -> tuple[Tensor, ...]:
    graph = torch.is_grad_enabled()  # a backward has none, and a function of autograd costs a host as much as a launch
    return _Exchange.apply(way, axis, split, *tensors) if graph else way(tensors, axis, split)  # type: ignore[no-any-return]


def to_heads(tensors: Sequence[Tensor], axis: Axis, split: TensorSplit) -> tuple[Tensor, ...]:
    """All positions of this rank's share of the heads, from own positions of all heads."""
    return _exchanged(_to_heads, tensors, axis, split)


def to_positions(tensors: Sequence[Tensor], axis: Axis, split: TensorSplit) -> tuple[Tensor, ...]:
    """Own positions of all heads, from all positions of this rank's share of the heads."""
    return _exchanged(_to_positions, tensors, axis, split)


def _to_heads(tensors: Sequence[Tensor], axis: Axis, split: TensorSplit) -> tuple[Tensor, ...]:
    size = axis.size
    # ranks x batch x positions x features of the heads of each: one copy, which is the message
    by_rank = (tensor.transpose(HEADS, POSITIONS).unflatten(-2, (size, -1)).movedim(-3, 0) for tensor in tensors)
    rows = [each.flatten(-2) for each in by_rank]
    apart = torch.cat(rows, -1)
    own, width = split.local_size(axis.rank), apart.shape[-1]
    receives = [apart[0].numel() // own * split.local_size(rank) for rank in range(size)]
    found = axis.all_to_all(apart.view(-1), [apart[0].numel()] * size, receives)
    parts = [part.view(*apart.shape[1:-2], -1, width) for part in found.split(receives)]
    joined = torch.cat([parts[rank].narrow(-2, at, length) for rank, at, length in _runs(split)], -2)
    pieces = joined.split([row.shape[-1] for row in rows], -1)
    return tuple(_heads(piece, tensor.shape[-1]) for piece, tensor in zip(pieces, tensors, strict=True))


def _to_positions(tensors: Sequence[Tensor], axis: Axis, split: TensorSplit) -> tuple[Tensor, ...]:
    size, own = axis.size, split.local_size(axis.rank)
    # positions x batch x features of the heads of each, with the positions of the first rank first
    rows = [tensor.transpose(HEADS, POSITIONS).flatten(-2).movedim(-2, 0) for tensor in tensors]
    widths, sizes = [row.shape[-1] for row in rows], [split.local_size(rank) for rank in range(size)]
    joined = rows[0].new_empty(*rows[0].shape[:-1], sum(widths))
    for row, place in zip(rows, joined.split(widths, -1), strict=True):
        torch.cat([row[start:stop] for pieces in split.pieces for start, stop in pieces], out=place)
    each = joined[0].numel()
    found = axis.all_to_all(joined.view(-1), [each * count for count in sizes], [each * own] * size)
    apart = found.view(size, own, *joined.shape[1:]).movedim(1, -2).split(widths, -1)
    return tuple(
        _heads(torch.cat(piece.unbind(), -1), tensor.shape[-1]) for piece, tensor in zip(apart, tensors, strict=True)
    )


@lru_cache(256)
def _runs(split: TensorSplit) -> tuple[tuple[int, int, int], ...]:
    """The rank of each run of positions, in order; where it begins in the rank's part, and its length."""
    boxes = sorted((run, rank, own) for rank in range(split.ranks) for run, own in split.boxes(rank))
    return tuple((rank, low, high - low) for _, rank, (low, high) in boxes)


def _heads(rows: Tensor, features: int) -> Tensor:
    """Heads of so many `features` each, which lie side by side in `rows`."""
    return rows.unflatten(-1, (-1, features)).transpose(HEADS, POSITIONS)
