"""Autograd functions over an `Axis` for the edges of a split region.

=========  =======================  =======================
function   forward                  backward
=========  =======================  =======================
`copy`     identity                 sum over the ranks
`reduce`   sum over the ranks       identity
`share`    divide by the ranks      identity
`take`     own shard                all shards, gathered
`gather`   all shards, gathered     own shard
=========  =======================  =======================

An axis may weigh the gradients of everything between its edges: the backwards of `gather` and `reduce` multiply by the
weight, and those of `copy` and `take` divide by it.

With `create_graph` a backward is differentiated in turn. So each backward is made of functions of this table, which
come in pairs: each is the backward of the other.

`share` is for a bias that every rank adds before the sum: N ranks each add an N-th. Its gradient is that of the sum,
which is the same on every rank. So replicas stay equal without communication.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_3d.errors import UnsupportedError
from lightning_3d.module.torch_private import has_memory
from lightning_3d.ranks.dtensor_private import from_spec, spec_of
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.geometry import TensorSplit, assemble, local_part
from lightning_3d.tensor.overlap import EarlySum


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axis: Axis, early: EarlySum | None) -> Tensor:
        ctx.axis, ctx.early = axis, early
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if not torch.compiler.is_compiling() and not has_memory(grad):  # torch.compile cannot trace the question
            raise UnsupportedError(
                "A backward computes several gradients at once (torch.autograd.grad(..., is_grads_batched=True), a"
                " Jacobian of torchjd) inside of a block that tensor ranks share: they exchange one gradient at a time."
                " Use zero_stage=0 with data ranks alone, and average those of weights by strategy.reduce(gradient)."
            )
        total, weight = partial(reduce, axis=ctx.axis), ctx.axis.weight
        result = total(grad) if ctx.early is None else ctx.early.end(grad, total)
        return result if weight == 1 else result / weight, None, None


def pair(name: str, forth: Callable[..., Tensor], back: Callable[..., Tensor]) -> Any:
    """A function of autograd that computes `forth`, and `back` for its gradient, with the same further arguments."""

    def forward(ctx: Any, tensor: Tensor, *args: Any) -> Tensor:
        ctx.args = args
        return forth(tensor, *args)

    def backward(ctx: Any, grad: Tensor) -> Any:
        return back(grad, *ctx.args), *(None for _ in ctx.args)

    return type(
        name, (torch.autograd.Function,), {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    )


def _times(grad: Tensor, weight: float) -> Tensor:
    return grad if weight == 1 else grad * weight


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor) -> Tensor:
        ctx.spec = spec_of(tensor)
        local = tensor.to_local()
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return from_spec(ctx.spec, grad.contiguous())


def gathered_shard(tensor: Any) -> Tensor | None:
    """This rank's shard of a parameter. None where ZeRO has not gathered it from data ranks.

    Where shards are uneven, gradients of `DTensor.to_local` have other strides than the parameter, so autograd clones
    them. A clone of a DTensor has the sizes that DTensor would have chosen, which are others.
    """
    if not isinstance(tensor, DTensor):
        return tensor  # type: ignore[no-any-return]
    return None if tensor.device_mesh.ndim > 1 else _Local.apply(tensor)


def local_shard(tensor: Tensor) -> Tensor:
    """As `gathered_shard`, for a parameter that a block has gathered before. Raises for one of a copied module."""
    if (shard := gathered_shard(tensor)) is None:  # no block of ours gathers it
        raise UnsupportedError(
            "A copy of a module is called, with weights that are shards of ZeRO: copy.deepcopy copies what a rank has,"
            " and the copy would compute with parts of rows. Make a new module, and load block.state_dict() into it, on"
            " every rank. Or call the module itself."
        )
    return shard


def gather_shards(tensor: Tensor, axis: Axis, split: TensorSplit) -> Tensor:
    """The full tensor of which each rank has a shard, without a graph."""
    shapes = [list(tensor.shape) for _ in range(axis.size)]
    for rank, shape in enumerate(shapes):
        shape[split.dim] = split.local_size(rank)
    return assemble(axis.all_gather(tensor, shapes), split)


def copy(tensor: Tensor, axis: Axis, early: EarlySum | None = None) -> Tensor:
    """An unsplit activation or parameter enters a split region: ranks sum its gradient, `early` where that began."""
    return _Copy.apply(tensor, axis, early) if tensor.requires_grad and torch.is_grad_enabled() else tensor


_Reduce = pair("Reduce", lambda x, axis: axis.all_reduce(x), lambda grad, axis: _times(copy(grad, axis), axis.weight))


def reduce(tensor: Tensor, axis: Axis) -> Tensor:
    # a function of autograd costs a host as much as the launch, and a backward has no graph
    graph = tensor.requires_grad and torch.is_grad_enabled()
    return _Reduce.apply(tensor, axis) if graph else axis.all_reduce(tensor)


def share(tensor: Tensor, axis: Axis) -> Tensor:
    """An N-th of a bias that N ranks add before their results are summed."""
    return _Share.apply(tensor, axis)


_Unshare = pair("Unshare", lambda grad, axis: grad.view_as(grad), share)
"""The backward of `share`, as a function that has a backward itself."""
_Share = pair(
    "Share",
    lambda x, axis: x / axis.size,
    lambda grad, axis: _Unshare.apply(grad, axis) if torch.is_grad_enabled() else grad,
)


def take(tensor: Tensor, axis: Axis, split: TensorSplit) -> Tensor:
    """Own shard of an unsplit activation that enters a split region."""
    return _Take.apply(tensor, axis, split)


def gather(tensor: Tensor, axis: Axis, split: TensorSplit) -> Tensor:
    """The full activation, from the shards in which it leaves a split region."""
    return _Gather.apply(tensor, axis, split)


def _own_part(tensor: Tensor, axis: Axis, split: TensorSplit) -> Tensor:
    own = local_part(tensor, split, axis.rank)
    return own if len(split.pieces[axis.rank]) > 1 else own.clone()  # several intervals are a copy already


def _of_full(grad: Tensor, axis: Axis, split: TensorSplit) -> Tensor:
    full = gather(grad, axis, split)
    return full if axis.weight == 1 else full / axis.weight


_Take = pair("Take", _own_part, _of_full)
_Gather = pair("Gather", gather_shards, lambda grad, axis, split: _times(take(grad, axis, split), axis.weight))
