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
from lightning_3d.tensor.geometry import TensorSplit, local_part

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
    # batch x positions x ranks x features of the heads of each
    apart = _side_by_side([tensor.transpose(HEADS, POSITIONS).unflatten(-2, (size, -1)) for tensor in tensors])
    own, width = apart[..., 0, 0].numel(), apart.shape[-1]
    receives = [own // apart.shape[-3] * split.local_size(rank) * width for rank in range(size)]
    found = axis.all_to_all(apart.movedim(-2, 0).reshape(-1), [own * width] * size, receives)
    parts = [part.view(*apart.shape[:-3], -1, width) for part in found.split(receives)]
    runs = [parts[rank].narrow(-2, at, length) for rank, at, length in _runs(split)]
    return _heads(torch.cat(runs, -2), [tensor.shape[HEADS] // size for tensor in tensors], tensors)


def _to_positions(tensors: Sequence[Tensor], axis: Axis, split: TensorSplit) -> tuple[Tensor, ...]:
    size, own = axis.size, split.local_size(axis.rank)
    joined = _side_by_side([tensor.transpose(HEADS, POSITIONS) for tensor in tensors])
    along = TensorSplit(-2, split.pieces)
    parts = [local_part(joined, along, rank).reshape(-1) for rank in range(size)]
    sends, width = [part.numel() for part in parts], joined.shape[-1]
    found = axis.all_to_all(torch.cat(parts), sends, [sends[axis.rank]] * size)
    apart = found.view(size, *joined.shape[:-2], own, width).movedim(0, -2)
    return _heads(apart, [tensor.shape[HEADS] for tensor in tensors], tensors)


@lru_cache(256)
def _runs(split: TensorSplit) -> tuple[tuple[int, int, int], ...]:
    """The rank of each run of positions, in order; where it begins in the rank's part, and its length."""
    boxes = sorted((run, rank, own) for rank in range(split.ranks) for run, own in split.boxes(rank))
    return tuple((rank, low, high - low) for _, rank, (low, high) in boxes)


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    """`tensors` with heads and their features, the last two dimensions, as one dimension for all."""
    flat = [tensor.flatten(-2) for tensor in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat, -1)


def _heads(joined: Tensor, heads: Sequence[int], like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The inverse: of each of `like` so many `heads`, from those of one rank or, in one more dimension, of all."""
    widths = [tensor.shape[-1] for tensor in like]
    pieces = joined.split([count * width for count, width in zip(heads, widths, strict=True)], -1)
    apart = (piece.unflatten(-1, (-1, width)) for piece, width in zip(pieces, widths, strict=True))
    all_ranks = joined.dim() > like[0].dim() - 1
    return tuple((piece.flatten(-3, -2) if all_ranks else piece).transpose(HEADS, POSITIONS) for piece in apart)
