"""A test for blocks that use other samples of a batch: a microbatch gives other values there than the full batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_3d.sandbox.trees import leaves

LARGEST = 2**20
"""Elements of a tensor from which only some are used."""
CallMarks = tuple[tuple[Tensor, ...], ...]
"""For each tensor that a call returns and each of its dimensions: two numbers for each index there."""


def row_marks(output: Any) -> CallMarks:
    """Marks of the floating-point tensors in the output of a call."""
    tensors = [leaf for leaf in leaves(output) if type(leaf) is Tensor and leaf.is_floating_point()]
    return tuple(tuple(_marks(tensor, dim) for dim in range(tensor.dim())) for tensor in tensors)


def _marks(tensor: Tensor, dim: int) -> Tensor:
    """A weighted sum over the other dimensions, and its scale. `asinh` keeps a mask of -1e9 from hiding the rest."""
    sample = _sample(tensor.detach(), dim).movedim(dim, 0)
    rows = sample.reshape(tensor.shape[dim], -1).double().nan_to_num().asinh()
    weights = torch.arange(1, rows.shape[1] + 1, dtype=rows.dtype, device=rows.device).sin()
    return torch.stack([rows @ weights, rows.abs() @ weights.abs()])


def _sample(tensor: Tensor, dim: int) -> Tensor:
    """Every so many elements of a large tensor, along the dimensions other than `dim`."""
    elements, index = tensor.numel(), [slice(None)] * tensor.dim()
    for other in reversed([other for other in range(tensor.dim()) if other != dim]):
        step = max(1, min(tensor.shape[other] // 16, elements // LARGEST))
        index[other] = slice(None, None, step)
        elements //= step
    return tensor[tuple(index)]


def first_that_mixes(full: Sequence[CallMarks], part: Sequence[CallMarks], rounding: float) -> int | None:
    """Index of the first call whose rows differ between the full batch and its first part; None where all agree.

    Args:
        full: marks of each call on the full batch.
        part: the same for the first samples of the batch.
        rounding: the allowed difference, relative to the scale of a row.
    """
    for index, (tensors, some) in enumerate(zip(full, part, strict=False)):
        if any(_mixes(*pair, rounding) for pair in zip(tensors, some, strict=False)):
            return index
    return None


def _mixes(full: tuple[Tensor, ...], part: tuple[Tensor, ...], rounding: float) -> bool:
    """Compare along the one dimension in which the part is shorter. A value without samples has none."""
    if len(full) != len(part):
        return False
    shorter = [at for at, (wanted, found) in enumerate(zip(full, part, strict=True)) if found.shape != wanted.shape]
    if len(shorter) != 1 or part[shorter[0]].shape[1] > full[shorter[0]].shape[1]:
        return False  # no rows: a list of boxes, say
    found = part[shorter[0]]
    wanted = full[shorter[0]][:, : found.shape[1]]
    return bool(((found[0] - wanted[0]).abs() > rounding * (wanted[1] + 1e-6)).any())
