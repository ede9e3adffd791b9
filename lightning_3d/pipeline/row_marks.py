"""A test for blocks that use other samples of a batch: a microbatch gives other values there than the full batch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_3d.sandbox.trees import leaves

OF_AN_INDEX = 2**14
"""Elements that are used of each index of a dimension. They depend on the other dimensions alone, so that a part of the
batch is compared by the same elements as the full batch."""
AT_ONCE = 2**20
"""Elements that are copied at a time."""
SECTIONS, SHORTEST = 16, 64
"""Most sums of a row, and the fewest elements of one: in a sum of few, rounding would look like other samples."""
CallMarks = tuple[tuple[Tensor, ...], ...]
"""For each tensor that a call returns and each of its dimensions: two numbers for each index there and each section."""


def row_marks(output: Any) -> CallMarks:
    """Marks of the floating-point tensors in the output of a call."""
    return tuple(_marks(leaf.detach()) for leaf in leaves(output) if type(leaf) is Tensor and leaf.is_floating_point())


def _marks(tensor: Tensor) -> tuple[Tensor, ...]:
    small = tensor.numel() <= AT_ONCE
    values = _values(tensor) if small else tensor
    found = []
    for dim in range(tensor.dim()):
        rows = _sample(values, dim).movedim(dim, 0).unsqueeze(-1).flatten(1)
        pieces = rows.split(max(1, AT_ONCE // max(1, rows.shape[1])))
        found.append(torch.cat([_sums(piece if small else _values(piece)) for piece in pieces], dim=1))
    return tuple(found)


def _values(tensor: Tensor) -> Tensor:
    """In single precision. `asinh` keeps a mask of -1e9 from hiding the rest."""
    return tensor.float().nan_to_num().asinh()


def _sums(rows: Tensor) -> Tensor:
    """A weighted sum of each section of each row, and its scale.

    A row of many elements has sections: in one sum of all, what they differ by may cancel.
    """
    sections = min(SECTIONS, max(1, rows.shape[1] // SHORTEST))
    length = -(-rows.shape[1] // sections)
    parts = F.pad(rows, (0, sections * length - rows.shape[1])).unflatten(1, (sections, length))
    weights = torch.arange(1, parts.shape[-1] + 1, dtype=rows.dtype, device=rows.device).sin()
    return torch.stack([parts @ weights, parts.abs() @ weights.abs()])


def _sample(tensor: Tensor, dim: int) -> Tensor:
    """Every so many elements of a large tensor, along the dimensions other than `dim`."""
    elements, index = tensor.numel() // max(1, tensor.shape[dim]), [slice(None)] * tensor.dim()
    for other in reversed([other for other in range(tensor.dim()) if other != dim]):
        step = max(1, min(tensor.shape[other] // 16, elements // OF_AN_INDEX))
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
    pairs = enumerate(zip(full, part, strict=True))
    shorter = [at for at, (wanted, found) in pairs if found.shape[1] != wanted.shape[1]]
    if len(shorter) != 1 or part[shorter[0]].shape[1] > full[shorter[0]].shape[1]:
        return False  # no rows: a list of boxes, say
    found = part[shorter[0]]
    wanted = full[shorter[0]][:, : found.shape[1]]
    return bool(((found[0] - wanted[0]).abs() > rounding * (wanted[1] + 1e-6)).any())
