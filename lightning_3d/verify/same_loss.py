"""Compares the first loss of ranks that work on the same samples: their gradients are added, so it must be one loss."""

from typing import Any

from lightning_3d.errors import DivergenceError
from lightning_3d.layout import PIPELINE_AXIS, Coordinate
from lightning_3d.pipeline.loss_mean import equal_losses
from lightning_3d.ranks import talk
from lightning_3d.sandbox.trees import loss_of


def compare_first_loss(output: Any, place: Coordinate, rounding: float) -> None:
    """Raise on every rank if the losses of tensor peers differ by more than `rounding`. Collective over the world.

    Args:
        output: of the training step. Its loss is read, so call this once.
        place: of this rank.
    """
    loss = loss_of(output)
    assert loss is not None, "Lightning refuses a step without one"
    mine = float(loss.detach())
    first: dict[tuple[int, int], tuple[int, float]] = {}
    for rank, (peers, other) in enumerate(talk.gather(((place.data, place[PIPELINE_AXIS]), mine))):
        known, expected = first.setdefault(peers, (rank, other))
        if not equal_losses(other, expected, rounding, least=1e-6):  # a loss may be about 0
            raise DivergenceError(
                f"The first training_step returned a loss of {expected} on rank {known} and of {other} on rank {rank},"
                " which are tensor ranks with the same samples. Each computes a part of the same gradient, so it would"
                " be wrong. Look for code that depends on the rank, on time or on a random generator of its own, and"
                " for other versions of a package on one node."
            )
