"""Sequence parallelism: between split regions each tensor rank has a shard of the sequence.

The residual stream enters a block in shards and is gathered at the input of a split region. The region's output is
summed and divided in one collective (reduce-scatter). Norms, dropout and residual sums in between run on shards. The
gradients of parameters used there are partial, and one sum completes those of a block. Blocks pass the shards to each
other as `LateTensor` tensors, so other code between them gets the full stream.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_3d.tensor.autograd_collectives import gather_shards, pair, reduce, take
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.geometry import TensorSplit, local_part
from lightning_3d.tensor.late_tensor import LateTensor, compute_late
from lightning_3d.tensor.overlap import EarlySum
from lightning_3d.tensor.sample import is_activation
from lightning_3d.tensor.tensor_plan import SequencePlan, UnitPlan


class _Enter(torch.autograd.Function):
    """Shards of the sequence -> the full sequence. The gradient is summed and divided."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, split: TensorSplit, early: EarlySum | None) -> Tensor:
        ctx.axis, ctx.split, ctx.early = axis, split, early
        return gather_shards(tensor, axis, split)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = partial(leave, axis=ctx.axis, split=ctx.split)
        return total(grad) if ctx.early is None else ctx.early.end(grad, total), None, None, None


class _CopyAll(torch.autograd.Function):
    """Identity of several unsplit parameters. Their gradients are summed in one buffer."""

    @staticmethod
    def forward(ctx: Any, axis: Axis, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.like = axis, tensors
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        filled = [torch.zeros_like(like) if grad is None else grad for grad, like in zip(grads, ctx.like, strict=True)]
        flat = reduce(torch.cat([grad.reshape(-1) for grad in filled]), ctx.axis)
        sums = flat.split([grad.numel() for grad in filled])
        return None, *(total.view_as(grad) for total, grad in zip(sums, filled, strict=True))


def enter(tensor: Tensor, axis: Axis, split: TensorSplit, early: EarlySum | None = None) -> Tensor:
    """The full sequence, from the shards of all ranks. The sum of its gradient may begin `early`."""
    return _Enter.apply(tensor, axis, split, early)


def leave(tensor: Tensor, axis: Axis, split: TensorSplit) -> Tensor:
    """This rank's shard of the sequence, from the partial sums of all ranks. Its gradient is gathered."""
    return _Leave.apply(tensor, axis, split)


_Leave = pair("Leave", lambda x, axis, split: axis.reduce_scatter(shards_of(x, axis, split)), enter)


def copy_all(tensors: list[Tensor], axis: Axis) -> list[Tensor]:
    """Unsplit parameters, for use on this rank's shard of the sequence."""
    return list(_CopyAll.apply(axis, *tensors)) if tensors and torch.is_grad_enabled() else tensors


def part_of(tensor: Tensor, axis: Axis, split: TensorSplit) -> Tensor:
    """This rank's shard of a divided stream, as another block left it, or taken from the full tensor."""
    if isinstance(tensor, LateTensor) and tensor.axis is axis and tensor.division == split and tensor.full is None:
        return compute_late(tensor.local)
    return take(compute_late(tensor), axis, split)


def are_distinct(others: Iterable[Tensor], stream: Tensor, split: TensorSplit) -> bool:
    """Return True if what the block makes of its undivided arguments cannot be mistaken for a shard of the stream."""
    lengths = {split.local_size(rank) for rank in range(split.ranks)}
    return not any(t.dim() == stream.dim() and t.shape[split.dim] in lengths for t in others)


def sequence_candidates(
    plan: UnitPlan, tensors: Sequence[Tensor], results: Sequence[Tensor], parameters: list[str], ranks: int
) -> Iterator[UnitPlan]:
    """The proven `plan` with the residual stream divided, in every way that may be right.

    A way in which a call with `tensors`, those of the proof, divides nothing is left out: it would prove nothing.
    """
    stream = next((index for index, tensor in enumerate(tensors) if is_activation(tensor) and tensor.dim() == 3), None)
    if stream is None or not plan.edges:
        return
    shape, others = tensors[stream].shape, [*tensors[:stream], *tensors[stream + 1 :]]
    inside = {*plan.splits, *plan.slices, *plan.summed, *plan.shared}
    outer = tuple(name for name in parameters if name not in inside)
    leaving = tuple(index for index, result in enumerate(results) if result.shape == shape)
    for dim in (dim for dim in (1, 0) if shape[dim] >= ranks):
        if not are_distinct(others, tensors[stream], TensorSplit.even(dim, shape[dim], ranks)):
            continue
        for entries in itertools.product(*plan.edges):
            flat = tuple(dict.fromkeys(name for group in entries for name in group))
            yield replace(plan, sequence=SequencePlan(dim, stream, leaving, flat, outer))


def shards_of(tensor: Tensor, axis: Axis, split: TensorSplit) -> list[Tensor]:
    return [local_part(tensor, split, rank) for rank in range(axis.size)]
