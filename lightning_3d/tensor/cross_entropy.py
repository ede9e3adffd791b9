"""Cross-entropy in parts: of the product of a head, some rows at a time; of logits with sharded classes, over ranks.

No more logits are in memory than those of one part of the rows. Backward computes the product of each part again. The
sums over parts have another order than one product has: values and gradients equal `F.cross_entropy` up to rounding.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_3d.layout import LOGITS_PART as PART
from lightning_3d.tensor.autograd_collectives import reduce
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.geometry import TensorSplit, local_part
from lightning_3d.tensor.late_product import Product

Losses = Callable[[Tensor, Tensor], Tensor]
"""The loss of each row of logits."""


def cross_entropy_in_parts(
    rows: Tensor,
    product: Product,
    target: Tensor,
    losses: Losses,
    classes: int,
    *,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
) -> Tensor:
    """`F.cross_entropy` of the product of `rows` by a head, in fp32 at least.

    `classes` are those of one rank: all ranks pass the same number, so that they have the same parts.
    """
    product.check_unwritten()
    wide = torch.promote_types(product.dtype, torch.float32)  # a sum in half precision may overflow

    def of_rows(result: Tensor, target: Tensor) -> Tensor:
        return losses(product.finish(result), target).to(wide)

    count = max(1, PART // (classes * rows.dtype.itemsize))
    flat = target.reshape(-1)
    found = _Parts.apply(rows.reshape(-1, rows.shape[-1]), product.weight, product.bias, flat, of_rows, count)
    if reduction == "none":
        found = found.view(target.shape)
    else:
        found = found.sum()
        if reduction == "mean":
            found = found / counted_weights(flat, weight, ignore_index).sum()
    return found


class _Parts(torch.autograd.Function):
    """The loss of each row."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, losses: Losses, count: int
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, bias, target)
        ctx.losses, ctx.count = losses, count
        with _as_cast(rows):
            parts = zip(rows.split(count), target.split(count), strict=True)
            return torch.cat([losses(F.linear(part, weight, bias), wanted) for part, wanted in parts])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, weight, bias, target = ctx.saved_tensors
        with _as_cast(rows):
            if torch.is_grad_enabled():  # create_graph: this backward needs a graph, and so all logits
                wanted = [
                    tensor
                    for tensor, needed in zip((rows, weight, bias), ctx.needs_input_grad[:3], strict=True)
                    if needed
                ]
                losses = ctx.losses(F.linear(rows, weight, bias), target)
                found = iter(torch.autograd.grad(losses, wanted, grad, create_graph=True))
                grads = tuple(next(found) if needed else None for needed in ctx.needs_input_grad[:3])
            else:
                grads = _gradients(ctx, rows, weight, bias, target, grad)
        return *grads, None, None, None


def _gradients(
    ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, grad: Tensor
) -> tuple[Tensor | None, ...]:
    of_rows, of_weight, of_bias = ctx.needs_input_grad[:3]
    by_rows = torch.empty_like(rows) if of_rows else None
    wide = torch.promote_types(weight.dtype, torch.float32)  # a sum over parts in half precision would be rounded often
    by_weight = torch.zeros_like(weight, dtype=wide) if of_weight else None
    by_bias = torch.zeros_like(bias, dtype=wide) if of_bias and bias is not None else None
    for start in range(0, len(rows), ctx.count):
        part = slice(start, start + ctx.count)
        logits = F.linear(rows[part], weight, bias).requires_grad_()
        with torch.enable_grad():
            losses = ctx.losses(logits, target[part])
        (by_logits,) = torch.autograd.grad(losses, logits, grad[part])
        if by_rows is not None:
            torch.mm(by_logits, weight, out=by_rows[part])
        if by_weight is not None and wide == weight.dtype:
            by_weight.addmm_(by_logits.T, rows[part])
        elif by_weight is not None:
            by_weight += by_logits.T @ rows[part]
        if by_bias is not None:
            by_bias += by_logits.sum(dim=0)
    return by_rows, _like(by_weight, weight), None if bias is None else _like(by_bias, bias)


def _like(grad: Tensor | None, tensor: Tensor) -> Tensor | None:
    return None if grad is None else grad.to(tensor.dtype)


def _as_cast(rows: Tensor) -> torch.autocast:
    """Without autocast: the operands have been cast when the head was called."""
    return torch.autocast(rows.device.type, enabled=False)


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
    """`F.cross_entropy` of the full logits, of which `logits` are this rank's classes. Equal on every rank.

    Ranks exchange one maximum and one sum, and gather nothing.
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
