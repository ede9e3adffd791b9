"""Whether a step's loss is a mean over samples, as cutting a batch into microbatches takes it to be."""

from collections.abc import Callable
from typing import Any

from lightning_3d.pipeline.microbatch import split_batch, weighted_mean

_ROUNDING = 1e-3


def unlike_its_mean(loss_of: Callable[[Any, int], float | None], batch: Any, sizes: list[int]) -> str | None:
    """What to tell a user whose loss on two microbatches together is another than the mean of its losses on each.

    Args:
        loss_of: the loss on some rows of the batch, without gradients, with random streams from a seed.
        batch: all of it.
        sizes: of the microbatches.
    """
    if len(sizes) < 2:
        return None
    first, second = sizes[:2]
    both = split_batch(batch, [first + second, *sizes[2:]])[0]
    together = loss_of(both, 0)
    if together is None or not _same(together, loss_of(both, 1)):
        return None  # it is random: dropout, noise
    one, other = split_batch(batch, sizes)[:2]
    apart = weighted_mean([loss_of(one, 0), loss_of(other, 0)], [first / (first + second), second / (first + second)])
    if _same(together, apart):
        return None
    return (
        f"the loss on {first + second} samples is {together:.6g}, the mean of the losses on {first} and on {second} of"
        f" them {apart:.6g}: it is no mean over samples (tokens that a mask leaves out unevenly, pairs of samples,"
        " batch norm), so microbatches do not train exactly as one device does. num_microbatches=1 runs the whole"
        " batch at once; loss_scope='batch' computes the loss on the whole batch, which helps unless it is batch norm"
        " inside the blocks."
    )


def _same(one: float, other: float | None) -> bool:
    return other is not None and (one != one or abs(one - other) <= _ROUNDING * max(abs(one), abs(other), 1e-6))
