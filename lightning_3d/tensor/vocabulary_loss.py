"""Cross-entropy on logits with sharded classes: one maximum and one sum over the ranks, and no gathering."""

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
    """`F.cross_entropy` of the full logits and class indices. Value and gradient are equal on every rank.

    Args:
        logits: this rank's classes, in the last dimension.
        target: class indices, of the shape of `logits` without its last dimension.
    """
    dtype = logits.dtype
    logits = logits.float() if dtype in (torch.float16, torch.bfloat16) else logits
    weight = None if weight is None else weight.to(logits.dtype)
    counted = target != ignore_index
    logits = logits - axis.all_max(logits.detach().amax(dim=-1)).unsqueeze(-1)
    sums = [logits.exp().sum(dim=-1), _picked(logits, target.masked_fill(~counted, 0), split, axis.rank)]
    if label_smoothing:
        own = None if weight is None else local_part(weight, TensorSplit(0, split.pieces), axis.rank)
        sums.append((logits if own is None else logits * own).sum(dim=-1))
    total, picked, *spread = reduce(torch.stack(sums), axis).unbind()
    log_total = total.log()
    of_class = counted_weights(target, weight, ignore_index).to(logits.dtype)
    loss = (log_total - picked) * of_class
    if label_smoothing:
        mass = split.size if weight is None else weight.sum()
        smooth = (log_total * mass - spread[0]) * counted
        loss = (1 - label_smoothing) * loss + label_smoothing / split.size * smooth
    if reduction == "mean":
        loss = loss.sum() / of_class.sum()
    elif reduction == "sum":
        loss = loss.sum()
    return loss.to(dtype)


def counted_weights(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """The weight of each class of `target` in a mean, zero where it is ignored."""
    counted = target != ignore_index
    return counted if weight is None else weight[target.masked_fill(~counted, 0)] * counted


def _picked(logits: Tensor, target: Tensor, split: TensorSplit, rank: int) -> Tensor:
    """The logit of the target class where this rank has it, zero elsewhere."""
    ((start, stop),) = split.pieces[rank]
    elsewhere = on_other_rank(target, start, stop, split.size)
    index = (target - start).masked_fill(elsewhere, 0).unsqueeze(-1)
    return logits.gather(-1, index).squeeze(-1).masked_fill(elsewhere, 0.0)


def on_other_rank(index: Tensor, start: int, stop: int, size: int) -> Tensor:
    """True for indices in 0 to `size` outside of `start` to `stop`, this rank's range. False for those out of range."""
    return ((index >= 0) & (index < start)) | ((index >= stop) & (index < size))
