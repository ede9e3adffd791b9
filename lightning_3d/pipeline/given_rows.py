"""A test for steps that give their blocks other samples than those of the batch: windows at random, drawn points.

A block gets rows for the batch that are the sum of those for its parts, or something that all of them share (positions,
prompts). A step that takes 32 windows out of its batch takes 32 out of each microbatch as well: other windows, and as
many times the work.
"""

from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

from lightning_3d.sandbox.fingerprint import Print, differ
from lightning_3d.sandbox.trees import leaves

Shape = tuple[int, ...]


class Given(NamedTuple):
    """The tensors among the arguments of a call."""

    shapes: tuple[Shape, ...]
    prints: list[Print]


def shapes_of(value: Any) -> tuple[Shape, ...]:
    """The shapes of the tensors in `value`."""
    return tuple(tuple(leaf.shape) for leaf in leaves(value) if isinstance(leaf, Tensor))


Kind = Literal["drawn", "chosen", "any"]
"""Random tensors of one length for all batches; as many rows for all batches, with other values; any number of rows."""


def first_not_of_rows(
    full: Sequence[Given], parts: Sequence[Sequence[Given]], drawn: frozenset[int], kind: Kind
) -> tuple[int, str] | None:
    """Index of the first call that gets other samples for the batch than for all of its parts, and the shapes.

    Args:
        full: of each call on the full batch.
        parts: the same for each part.
        drawn: lengths of random tensors that are the same for the batch and its parts.
        kind: "drawn" where the loss is a mean over samples, "chosen" where numbers of rows may be random.
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
    if any(part.shapes != full.shapes for part in parts):
        return kind == "any"
    return bool(drawn) or (kind != "drawn" and any(differ(full.prints, part.prints, 1e-3) for part in parts))


def _are_rows(full: Shape, parts: Sequence[Shape]) -> bool:
    """True where one of the dimensions is divided among the parts."""
    if {len(part) for part in parts} != {len(full)}:
        return False
    lengths = [[part[dim] for part in parts] for dim in range(len(full))]
    if len(parts) == 1:
        return any(length[0] < whole for whole, length in zip(full, lengths, strict=True))
    return any(sum(length) == whole for whole, length in zip(full, lengths, strict=True))
