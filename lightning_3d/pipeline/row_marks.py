"""Tests for blocks that use other samples of a batch, and for steps that give blocks other samples than their batch's.

A block of the first kind gives other values for a microbatch than for the full batch. A step of the second kind takes
32 windows out of its batch, say, and 32 out of each microbatch as well: other windows, and as many times the work. A
block should get the rows that its parts get together, or something that all of them share (positions, prompts).
"""

from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_3d.sandbox.fingerprint import Print, differ
from lightning_3d.sandbox.trees import leaves, tensors_in

OF_AN_INDEX, OF_ALL = 2**14, 2**18
"""Elements that are used of each index of a dimension, and of all its first indices. They depend on the other
dimensions alone: a part of the batch is compared by the same elements as the full batch."""
SECTIONS, SHORTEST = 16, 64
"""Most sums of a row, and the fewest elements of one."""
OF_THE_ROW = 1e-3
"""Smallest scale of a section, relative to its row: it may have rounding only."""
CallMarks = tuple[tuple[tuple[int, Tensor], ...], ...]
"""For each tensor that a call returns and each of its dimensions: its length, and two numbers for each of its first and
of its last indices, and each section."""


def row_marks(output: Any) -> CallMarks:
    """Marks of the floating-point tensors in the output of a call."""
    return tuple(_marks(leaf.detach()) for leaf in leaves(output) if type(leaf) is Tensor and leaf.is_floating_point())


def _marks(tensor: Tensor) -> tuple[tuple[int, Tensor], ...]:
    found = []
    for dim, length in enumerate(tensor.shape):
        others = _sample(tensor, dim).movedim(dim, 0)
        some = max(1, OF_ALL // max(1, others.shape[1:].numel()))
        first = _sums(_values(others[:some].unsqueeze(-1).flatten(1)))
        last = first if length <= some else _sums(_values(others[-some:].unsqueeze(-1).flatten(1)))
        found.append((length, torch.stack([first, last]).cpu()))
    return tuple(found)


def _values(tensor: Tensor) -> Tensor:
    """The values in single precision. `asinh` keeps a mask of -1e9 from hiding the rest."""
    return tensor.float().nan_to_num().asinh()


def _sums(rows: Tensor) -> Tensor:
    """A weighted sum of each section of each row, and its scale.

    A row of many elements has sections: in one sum of all, what they differ by may cancel.
    """
    sections = min(SECTIONS, max(1, rows.shape[1] // SHORTEST))
    length = -(-rows.shape[1] // sections)
    parts = F.pad(rows, (0, sections * length - rows.shape[1])).unflatten(1, (sections, length))
    weights = torch.arange(1, length + 1, dtype=rows.dtype, device=rows.device).sin()
    scale = parts.abs() @ weights.abs()
    return torch.stack([parts @ weights, scale.maximum(OF_THE_ROW * scale.sum(1, keepdim=True))])


def _sample(tensor: Tensor, dim: int) -> Tensor:
    """Every so many elements of a large tensor, along the dimensions other than `dim`."""
    elements, index = tensor.numel() // max(1, tensor.shape[dim]), [slice(None)] * tensor.dim()
    for other in reversed([other for other in range(tensor.dim()) if other != dim]):
        step = max(1, min(tensor.shape[other] // 16, elements // OF_AN_INDEX))
        index[other] = slice(None, None, step)
        elements //= step
    return tensor[tuple(index)]


def first_that_mixes(
    full: Sequence[CallMarks], part: Sequence[CallMarks], rounding: float, *, last: bool = False
) -> int | None:
    """Index of the first call whose rows differ between the full batch and its first samples, or its `last` ones."""
    for index, (tensors, some) in enumerate(zip(full, part, strict=False)):
        if any(_mixes(*pair, rounding, last) for pair in zip(tensors, some, strict=False)):
            return index
    return None


def _mixes(
    full: tuple[tuple[int, Tensor], ...], part: tuple[tuple[int, Tensor], ...], rounding: float, last: bool
) -> bool:
    """Compare along the one dimension in which the part is shorter. A value without samples has none."""
    if len(full) != len(part):
        return False
    pairs = zip(full, part, strict=True)
    shorter = [(length, wanted, rows, found) for (length, wanted), (rows, found) in pairs if rows != length]
    if len(shorter) != 1:
        return False  # no rows: a list of boxes, say
    [(length, wanted, rows, found)] = shorter
    some = min(found.shape[2], wanted.shape[2])
    here = (slice(1, None), ..., slice(-some, None), slice(None)) if last else (slice(1), ..., slice(some), slice(None))
    return rows < length and _are_other(wanted[here], found[here], rounding)


def first_other(one: Sequence[CallMarks], other: Sequence[CallMarks], rounding: float) -> int | None:
    """Index of the first call that gave other values in another run on the same rows; None where all agree."""
    for index, (tensors, others) in enumerate(zip(one, other, strict=False)):
        pairs = [
            pair for these, those in zip(tensors, others, strict=False) for pair in zip(these, those, strict=False)
        ]
        if any(length != size or _are_other(wanted, found, rounding) for (length, wanted), (size, found) in pairs):
            return index
    return None


def _are_other(wanted: Tensor, found: Tensor, rounding: float) -> bool:
    return wanted.shape != found.shape or bool(
        ((found[:, 0] - wanted[:, 0]).abs() > rounding * (wanted[:, 1] + 1e-6)).any()
    )


Shape = tuple[int, ...]


class Given(NamedTuple):
    """The tensors among the arguments of a call."""

    shapes: tuple[Shape, ...]
    prints: list[Print]


def shapes_of(value: Any) -> tuple[Shape, ...]:
    return tuple(tuple(tensor.shape) for tensor in tensors_in(value))


Kind = Literal["drawn", "chosen", "fixed", "any"]
"""Random tensors of one length for all batches; as many rows, with other values; so many at most; any number."""


def first_not_of_rows(
    full: Sequence[Given], parts: Sequence[Sequence[Given]], drawn: frozenset[int], kind: Kind
) -> tuple[int, str] | None:
    """Index of the first call that gets other samples for the batch than for all of its parts, and the shapes.

    Args:
        drawn: lengths of random tensors that are the same for the batch and its parts.
        kind: "drawn" where the loss is a mean over samples, "chosen" where numbers of rows are random, "fixed" where
            values alone are.
    """
    for at, whole in enumerate(full):
        some = [part[at] for part in parts if at < len(part)]
        if len(some) < len(parts) or {len(each.shapes) for each in some} != {len(whole.shapes)}:
            return None  # other blocks run
        pieces = list(zip(*(each.shapes for each in some), strict=True))
        lengths = {shape[0] for shape in whole.shapes if shape} - {1}  # one row is a number for all of the batch
        if lengths and not any(map(_are_rows, whole.shapes, pieces)) and _is_chosen(whole, some, lengths & drawn, kind):
            rows = ", ".join(str(each.shapes[0]) for each in some)
            return at, f"{whole.shapes[0]} for the batch, and {rows} for parts of it"
    return None


def _is_chosen(full: Given, parts: Sequence[Given], drawn: Collection[int], kind: Kind) -> bool:
    if not all(alike := [part.shapes == full.shapes for part in parts]):
        return kind == "any" or (kind == "fixed" and any(alike))
    return bool(drawn) or (kind != "drawn" and any(differ(full.prints, part.prints, 1e-3) for part in parts))


def _are_rows(full: Shape, parts: Sequence[Shape]) -> bool:
    """True where one of the dimensions is divided among the parts."""
    if {len(part) for part in parts} != {len(full)}:
        return False
    lengths = [[part[dim] for part in parts] for dim in range(len(full))]
    if len(parts) == 1:
        return any(length[0] < whole for whole, length in zip(full, lengths, strict=True))
    return any(sum(length) == whole for whole, length in zip(full, lengths, strict=True))
