"""Compares the first loss of ranks that work on the same samples: their gradients are added, so it must be one loss."""

from typing import Any

from lightning_3d.errors import DivergenceError
from lightning_3d.layout import PIPELINE_AXIS, Coordinate
from lightning_3d.ranks import talk
from lightning_3d.sandbox.trees import loss_of


def compare_first_loss(output: Any, place: Coordinate, rounding: float) -> None:
    """Raise on every rank if the losses of peers differ by more than `rounding`. Collective over the world.

    Args:
        output: of the training step. Its loss is read, so call this once.
        place: of this rank.
    """
    loss = loss_of(output)
    mine = None if loss is None else float(loss.detach())
    first: dict[tuple[int, int], tuple[int, float | None]] = {}
    for rank, (peers, other) in enumerate(talk.gather(((place.data, place[PIPELINE_AXIS]), mine))):
        known, expected = first.setdefault(peers, (rank, other))
        if not _alike(other, expected, rounding):
            raise DivergenceError(
                f"The first training_step returned a loss of {expected} on rank {known} and of {other} on rank {rank},"
                " which have the same samples. Each computes a part of the same gradient, so it would"
                " be wrong. Look for code that depends on the rank, on time or on a random generator of its own, and"
                " for other versions of a package on one node."
            )


def _alike(one: float | None, other: float | None, rounding: float) -> bool:
    if one is None or other is None or one != one or other != other:
        return repr(one) == repr(other)
    return one == other or abs(one - other) <= rounding * max(abs(one), abs(other)) + 1e-6  # a loss may be about 0
