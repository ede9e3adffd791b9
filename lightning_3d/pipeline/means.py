"""Whether a step's loss is a mean over samples, as cutting a batch into microbatches takes it to be."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch import Tensor

from lightning_3d.pipeline.microbatch import leaves, split_batch, weighted_mean

_ROUNDING = 1e-3
_SEEDS = (1, 2)
"""Beside 0: a random loss comes out alike with one of them often enough, with both hardly."""


def unlike_its_mean(loss_of: Callable[[Any, int], float | None], batch: Any, sizes: list[int]) -> str | None:
    """What to tell a user whose loss on two microbatches together is another than the mean of its losses on each.

    Neighbours are taken that padding and labels left out make most unlike: the first two may happen to be full.

    Args:
        loss_of: the loss on some rows of the batch, without gradients, with random streams from a seed.
        batch: all of it.
        sizes: of the microbatches.
    """
    if len(sizes) < 2:
        return None
    pieces = split_batch(batch, sizes)
    at = _most_uneven(pieces, sizes)
    first, second = sizes[at : at + 2]
    both = split_batch(batch, [*sizes[:at], first + second, *sizes[at + 2 :]])[at]
    together = loss_of(both, 0)
    if together is None or not all(_same(together, loss_of(both, seed)) for seed in _SEEDS):
        return None  # it is random: dropout, noise
    one, other = pieces[at : at + 2]
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


def _most_uneven(pieces: list[Any], sizes: list[int]) -> int:
    """Where the two neighbours begin that differ most in how much of a sample is left out."""
    left_out = [[count / size for count in _left_out(piece)] for piece, size in zip(pieces, sizes, strict=True)]
    # of lists with an entry per sample, pieces of unequal sizes hold unequal numbers of tensors
    unlike = [sum(abs(a - b) for a, b in zip(*both, strict=False)) for both in pairwise(left_out)]
    return unlike.index(max(unlike))


def _left_out(piece: Any) -> list[int]:
    """Of each tensor the zeros (a mask's, padding), and the negative integers (labels to be ignored)."""
    tensors = [leaf for leaf in leaves(piece) if isinstance(leaf, Tensor) and not leaf.is_complex()]
    zeros = [int((leaf == 0).sum()) for leaf in tensors]
    return zeros + [int((leaf < 0).sum()) for leaf in tensors if not leaf.is_floating_point()]


def _same(one: float, other: float | None) -> bool:
    return other is not None and (one != one or abs(one - other) <= _ROUNDING * max(abs(one), abs(other), 1e-6))
