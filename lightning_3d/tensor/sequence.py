"""Sequence parallelism: between split regions each tensor rank holds a part of the sequence.

The residual stream enters a block in parts, is gathered where it enters a split region, and what leaves the region is
summed and divided in one go. Norms, dropout and residual sums in between run on the parts. Parameters used there find
a part of their gradient on each rank: one sum for all of a block's. Blocks pass the parts to each other as `LateGather`
tensors, so code between them that does anything else with the stream sees it whole.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_3d.tensor.autograd_collectives import gather_shards, reduce
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.geometry import TensorSplit, local_part
from lightning_3d.tensor.overlap import Early
from lightning_3d.tensor.tensor_plan import SequencePlan, UnitPlan


class _Enter(torch.autograd.Function):
    """Parts of the sequence -> the whole; the gradient is summed and divided."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, split: TensorSplit, early: Early | None) -> Tensor:
        ctx.axis, ctx.split, ctx.early = axis, split, early
        return gather_shards(tensor, axis, split)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = partial(leave, axis=ctx.axis, split=ctx.split)
        return total(grad) if ctx.early is None else ctx.early.end(grad, total), None, None, None


class _Leave(torch.autograd.Function):
    """Partial sums -> own part of the sum; the gradient is gathered."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, split: TensorSplit) -> Tensor:
        ctx.axis, ctx.split = axis, split
        return axis.reduce_scatter(shards_of(tensor, axis, split))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return enter(grad, ctx.axis, ctx.split), None, None


class _CopyAll(torch.autograd.Function):
    """Several whole parameters; their gradients are summed in one buffer."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.like = axis, tensors
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        filled = [torch.zeros_like(like) if grad is None else grad for grad, like in zip(grads, ctx.like, strict=True)]
        flat = reduce(torch.cat([grad.reshape(-1) for grad in filled]), ctx.axis)
        parts = flat.split([grad.numel() for grad in filled])
        return None, *(part.view_as(grad) for part, grad in zip(parts, filled, strict=True))


def enter(tensor: Tensor, axis: Axis, split: TensorSplit, early: Early | None = None) -> Tensor:
    """The whole sequence, from every rank's part; the sum of its gradient may have begun `early`."""
    return _Enter.apply(tensor, axis, split, early)


def leave(tensor: Tensor, axis: Axis, split: TensorSplit) -> Tensor:
    """This rank's part of the sequence, from every rank's partial sum of all of it."""
    return _Leave.apply(tensor, axis, split)


def copy_all(tensors: list[Tensor], axis: Axis) -> list[Tensor]:
    """Whole parameters that each rank uses on its part of the sequence."""
    return list(_CopyAll.apply(axis, *tensors)) if tensors and torch.is_grad_enabled() else tensors


def sequence_candidates(
    plan: UnitPlan,
    shapes: Mapping[int, torch.Size],
    results: Mapping[int, torch.Size],
    parameters: list[str],
    ranks: int,
) -> Iterator[UnitPlan]:
    """`plan` with the residual stream in parts, in every way that may be right.

    Args:
        plan: proven without.
        shapes: of the block's activation arguments, by index among its tensors.
        results: shapes of the block's results.
        parameters: the block's trainable parameters.
        ranks: that share the stream. Along a dimension with fewer elements nothing would be divided, nor proven.
    """
    stream = next((index for index, shape in shapes.items() if len(shape) == 3), None)
    if stream is None or not plan.edges:
        return
    inside = {*plan.splits, *plan.slices, *plan.summed, *plan.shared}
    outer = tuple(name for name in parameters if name not in inside)
    leaving = tuple(index for index, shape in results.items() if shape == shapes[stream])
    for dim in (dim for dim in (1, 0) if shapes[stream][dim] >= ranks):
        for entries in itertools.product(*plan.edges):
            flat = tuple(dict.fromkeys(name for group in entries for name in group))
            yield replace(plan, sequence=SequencePlan(dim, stream, leaving, flat, outer))


def shards_of(tensor: Tensor, axis: Axis, split: TensorSplit) -> list[Tensor]:
    """Every rank's part."""
    return [local_part(tensor, split, rank) for rank in range(axis.size)]
