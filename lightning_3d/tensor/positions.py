"""A division along positions, followed through views, and a loss whose rows are divided. Of sizes; no module."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from lightning_3d.tensor.autograd_collectives import reduce
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.geometry import Interval, TensorSplit
from lightning_3d.tensor.vocabulary_loss import counted_weights


@lru_cache(256)
def reshaped(split: TensorSplit, shape: tuple[int, ...], new: tuple[int, ...]) -> TensorSplit | None:
    """`split` of a tensor of `shape`, after it is reshaped to `new`. None where that divides several dimensions."""
    wanted = _elements(split, shape)
    for dim in range(len(new)):
        inner = prod(new[dim + 1 :])
        row = new[dim] * inner
        firsts = [[(start, min(stop, row)) for start, stop in each if start < row] or [(0, 0)] for each in wanted]
        if inner and all(at % inner == 0 for each in firsts for interval in each for at in interval):
            pieces = tuple(tuple((start // inner, stop // inner) for start, stop in each) for each in firsts)
            found = TensorSplit(dim, pieces)
            if _elements(found, new) == wanted:
                return found
    return None


def _elements(split: TensorSplit, shape: Sequence[int]) -> list[list[Interval]]:
    """The intervals of each rank in the flattened tensor."""
    inner = prod(shape[split.dim + 1 :])
    row = shape[split.dim] * inner
    found: list[list[Interval]] = []
    for piece in split.pieces:
        own: list[Interval] = []
        for outer in range(prod(shape[: split.dim])):
            for start, stop in piece:
                begin, end = outer * row + start * inner, outer * row + stop * inner
                if own and own[-1][1] == begin:
                    own[-1] = (own[-1][0], end)
                elif begin < end:
                    own.append((begin, end))
        found.append(own)
    return found


@lru_cache(256)
def sliced(split: TensorSplit, start: int, stop: int) -> tuple[TensorSplit, tuple[slice, ...]]:
    """`split` of the positions from `start` to `stop` alone, and the slice of each rank's part that has them."""
    clip = lambda at: min(max(at, start), stop) - start  # noqa: E731
    pieces = tuple(tuple((clip(low), clip(high)) for low, high in piece) for piece in split.pieces)
    before = lambda at, piece: sum(min(max(at, low), high) - low for low, high in piece)  # noqa: E731
    return TensorSplit(split.dim, pieces), tuple(slice(before(start, p), before(stop, p)) for p in split.pieces)


def loss_over_ranks(
    losses: Tensor, target: Tensor, axis: Axis, *, weight: Tensor | None, ignore_index: int, reduction: str
) -> Tensor:
    """The sum or mean of the `losses` of all ranks. Only a sum is sent: each rank can count the whole `target`."""
    wide = torch.promote_types(losses.dtype, torch.float32)  # a sum in half precision may overflow
    total = reduce(losses.to(wide).sum(), axis)
    if reduction == "mean":
        total = total / counted_weights(target, weight, ignore_index).sum()
    return total.to(losses.dtype)
