"""What happens at the edges of a split region, as autograd functions over an `Axis`.

=========  =======================  =======================
function   forward                  backward
=========  =======================  =======================
`copy`     identity                 sum over the ranks
`reduce`   sum over the ranks       identity
`share`    divide by the ranks      identity
`take`     own part                 all parts, gathered
`gather`   all parts, gathered      own part
=========  =======================  =======================

Where the graph of a backward is kept (`create_graph`), that backward is differentiated in turn: so each is made of
functions of this table, which come in pairs, each the backward of the other.

`share` is for a bias that every rank adds before the sum: N times a N-th. Its gradient is that of the sum, which is
the same on every rank, so that replicas stay equal with no communication.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.geometry import TensorSplit, assemble, local_part
from lightning_3d.tensor.overlap import Early


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, early: Early | None) -> Tensor:
        ctx.axis, ctx.early = axis, early
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        total = partial(reduce, axis=ctx.axis)
        return total(grad) if ctx.early is None else ctx.early.end(grad, total), None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return axis.all_reduce(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return copy(grad, ctx.axis), None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return tensor / axis.size

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Unshare.apply(grad, ctx.axis), None


class _Unshare(torch.autograd.Function):
    """The gradient of `share`, so that it has one of its own."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return share(grad, ctx.axis), None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, split: TensorSplit) -> Tensor:
        ctx.axis, ctx.split = axis, split
        return local_part(tensor, split, axis.rank).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gather(grad, ctx.axis, ctx.split), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, split: TensorSplit) -> Tensor:
        ctx.axis, ctx.split = axis, split
        return gather_shards(tensor, axis, split)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return take(grad, ctx.axis, ctx.split), None, None


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.mesh, ctx.placements, ctx.shape, ctx.stride = (
            tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
        )  # fmt: skip
        local = tensor.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return DTensor.from_local(
            grad.contiguous(), ctx.mesh, ctx.placements, run_check=False, shape=ctx.shape, stride=ctx.stride
        )


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard of a parameter.

    `DTensor.to_local` would give gradients strides of their own where shards are uneven, so that autograd clones them,
    and a clone of a DTensor has the sizes that DTensor would have chosen.
    """
    return _Local.apply(tensor) if isinstance(tensor, DTensor) else tensor


def gather_shards(tensor: Tensor, axis: Axis, split: TensorSplit) -> Tensor:
    """The whole of what each rank holds a part of; autograd does not follow."""
    shapes = [list(tensor.shape) for _ in range(axis.size)]
    for rank, shape in enumerate(shapes):
        shape[split.dim] = split.local_size(rank)
    return assemble(axis.all_gather(tensor, shapes), split)


def copy(tensor: Tensor, axis: Axis, early: Early | None = None) -> Tensor:
    """A whole activation or parameter enters a split region: its gradient is the sum of what each rank finds.

    Args:
        tensor: what enters.
        axis: the tensor axis.
        early: where the sum may have begun before.
    """
    return _Copy.apply(tensor, axis, early) if tensor.requires_grad and torch.is_grad_enabled() else tensor


def reduce(tensor: Tensor, axis: Axis) -> Tensor:
    """Partial sums leave a split region."""
    return _Reduce.apply(tensor, axis)


def share(tensor: Tensor, axis: Axis) -> Tensor:
    """A N-th of a bias that N ranks add before their results are summed."""
    return _Share.apply(tensor, axis)


def take(tensor: Tensor, axis: Axis, split: TensorSplit) -> Tensor:
    """Own part of a whole activation that enters a split region."""
    return _Take.apply(tensor, axis, split)


def gather(tensor: Tensor, axis: Axis, split: TensorSplit) -> Tensor:
    """The whole of an activation that leaves a split region in parts."""
    return _Gather.apply(tensor, axis, split)
