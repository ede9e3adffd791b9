"""The exchange of heads: each rank gets all positions of some heads, and gives away the other heads of its part.

`to_heads` and `to_positions` are each the backward of the other.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.geometry import TensorSplit

HEADS, POSITIONS = -3, -2
"""Dimensions of queries, keys and values."""


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, split: TensorSplit, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.split = axis, split
        lengths = [split.local_size(rank) for rank in range(axis.size)]
        sent = [tensor.chunk(axis.size, HEADS) for tensor in tensors]
        return tuple(torch.cat(parts, POSITIONS) for parts in _swapped(axis, sent, POSITIONS, lengths))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *to_positions(grads, ctx.axis, ctx.split)


class _ToPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, split: TensorSplit, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.split = axis, split
        lengths = [split.local_size(rank) for rank in range(axis.size)]
        sent = [tensor.split(lengths, POSITIONS) for tensor in tensors]
        return tuple(
            torch.cat(parts, HEADS) for parts in _swapped(axis, sent, POSITIONS, [lengths[axis.rank]] * axis.size)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *to_heads(grads, ctx.axis, ctx.split)


def to_heads(tensors: Sequence[Tensor], axis: Axis, split: TensorSplit) -> tuple[Tensor, ...]:
    """All positions of this rank's share of the heads, from own positions of all heads. One message for all tensors."""
    return _ToHeads.apply(axis, split, *tensors)  # type: ignore[no-any-return]


def to_positions(tensors: Sequence[Tensor], axis: Axis, split: TensorSplit) -> tuple[Tensor, ...]:
    """Own positions of all heads, from all positions of this rank's share of the heads."""
    return _ToPositions.apply(axis, split, *tensors)  # type: ignore[no-any-return]


def _swapped(axis: Axis, sent: Sequence[Sequence[Tensor]], dim: int, lengths: Sequence[int]) -> list[list[Tensor]]:
    """For each tensor the pieces that all ranks send here, `lengths[rank]` long along `dim`.

    Args:
        sent: for each tensor a piece for each rank.
    """
    shapes = [_shapes(pieces[axis.rank], dim, lengths) for pieces in sent]
    flat = torch.cat([pieces[rank].reshape(-1) for rank in range(axis.size) for pieces in sent])
    sends = [sum(pieces[rank].numel() for pieces in sent) for rank in range(axis.size)]
    receives = [sum(shape[rank].numel() for shape in shapes) for rank in range(axis.size)]
    buffers = axis.all_to_all(flat, sends, receives).split(receives)
    found: list[list[Tensor]] = [[] for _ in sent]
    for rank, buffer in enumerate(buffers):
        parts = buffer.split([shape[rank].numel() for shape in shapes])
        for pieces, part, shape in zip(found, parts, shapes, strict=True):
            pieces.append(part.view(shape[rank]))
    return found


def _shapes(own: Tensor, dim: int, lengths: Sequence[int]) -> list[torch.Size]:
    shape = list(own.shape)
    found = []
    for length in lengths:
        shape[dim] = length
        found.append(torch.Size(shape))
    return found
