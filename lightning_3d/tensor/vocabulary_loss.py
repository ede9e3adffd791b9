"""Cross-entropy on logits of which each tensor rank holds some classes. Two small sums over the ranks, no gathering."""

import torch
from torch import Tensor

from lightning_3d.tensor.autograd_collectives import reduce
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.geometry import TensorSplit, local_part


def parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    split: TensorSplit,
    axis: Axis,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """What `F.cross_entropy` gives for the whole logits and class indices; the same value and gradient on every rank.

    Args:
        logits: this rank's classes, in the last dimension.
        target: class indices, of the shape of `logits` without its last dimension.
        split: which classes each rank has.
        axis: the tensor axis.
        weight: of every class.
        ignore_index: as in `F.cross_entropy`.
        reduction: as in `F.cross_entropy`.
        label_smoothing: as in `F.cross_entropy`.
    """
    dtype = logits.dtype
    logits = logits.float() if dtype in (torch.float16, torch.bfloat16) else logits
    weight = None if weight is None else weight.to(logits.dtype)
    kept = target != ignore_index
    logits = logits - axis.all_max(logits.detach().amax(dim=-1)).unsqueeze(-1)
    parts = [logits.exp().sum(dim=-1), _picked(logits, target.masked_fill(~kept, 0), split, axis.rank)]
    if label_smoothing:
        own = None if weight is None else local_part(weight, _along(split), axis.rank)
        parts.append((logits if own is None else logits * own).sum(dim=-1))
    total, picked, *spread = reduce(torch.stack(parts), axis).unbind()
    log_total = total.log()
    of_class = kept.to(logits.dtype) if weight is None else weight[target.masked_fill(~kept, 0)] * kept
    loss = (log_total - picked) * of_class
    if label_smoothing:
        mass = split.size if weight is None else weight.sum()
        smooth = (log_total * mass - spread[0]) * kept
        loss = (1 - label_smoothing) * loss + label_smoothing / split.size * smooth
    if reduction == "mean":
        loss = loss.sum() / of_class.sum()
    elif reduction == "sum":
        loss = loss.sum()
    return loss.to(dtype)


def _picked(logits: Tensor, target: Tensor, split: TensorSplit, rank: int) -> Tensor:
    """The logit of the target class where this rank has it, else zero."""
    ((start, stop),) = split.pieces[rank]
    elsewhere = held_elsewhere(target, start, stop, split.size)
    index = (target - start).masked_fill(elsewhere, 0).unsqueeze(-1)
    return logits.gather(-1, index).squeeze(-1).masked_fill(elsewhere, 0.0)


def held_elsewhere(index: Tensor, start: int, stop: int, size: int) -> Tensor:
    """Which of these indices of 0 to `size` another rank has than the one with `start` to `stop`; not those that none
    has."""
    return ((index >= 0) & (index < start)) | ((index >= stop) & (index < size))


def _along(split: TensorSplit) -> TensorSplit:
    return TensorSplit(0, split.pieces)
