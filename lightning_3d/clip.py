"""The norm of all gradients, each element counted once, wherever it lives."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from lightning_3d.errors import ConfigurationError
from lightning_3d.layout import DATA_AXIS, TENSOR_AXIS, Coordinate
from lightning_3d.local import local
from lightning_3d.mesh import SHARD_AXIS

Counted = Callable[[nn.Parameter], bool]


def counted_here(parameter: Tensor, coordinate: Coordinate, shard_size: int) -> bool:
    """Whether this rank is the one that counts its part of `parameter`.

    Along an axis that splits the parameter every rank counts its own part; along one that replicates it only the first.

    Args:
        parameter: plain, or a DTensor that names the axes it is split over.
        coordinate: of this rank.
        shard_size: data ranks that share one sharded copy (hybrid shard: the copies are replicas).
    """
    split: set[str] = set()
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        split = {n for n, p in zip(names, parameter.placements, strict=True) if not isinstance(p, Replicate)}
    first = shard_size if {DATA_AXIS, SHARD_AXIS} & split else 1
    return coordinate.data < first and (TENSOR_AXIS in split or coordinate.tensor == 0)


@torch.no_grad()
def grad_norm(parameters: Iterable[nn.Parameter], counted: Counted, norm_type: float, device: torch.device) -> Tensor:
    """The norm that one process would compute. Collective over the world; the same bits on every rank.

    Args:
        parameters: may lack gradients; those that this rank does not count are left out.
        counted: whether this rank counts its part of a parameter.
        norm_type: 2, infinity, or any other p above 0.
        device: that the ranks communicate from.
    """
    if not norm_type > 0:
        raise ConfigurationError(
            f"grad_norm({norm_type}): the norms of the parts that ranks hold can be put together for a norm type above"
            " 0 only. Use 1.0, 2.0 or float('inf')."
        )
    mine = [local(p.grad) for p in parameters if p.grad is not None and counted(p)]
    norms = [torch.linalg.vector_norm(grad, norm_type, dtype=_wide(grad)).double() for grad in mine if grad.numel()]
    norm = torch.stack([each.to(device) for each in norms]) if norms else torch.zeros(1, dtype=torch.double)
    norm = norm.to(device)
    if math.isinf(norm_type):
        return _largest(norm)
    total = (norm**norm_type).sum()
    dist.all_reduce(total)
    return total ** (1.0 / norm_type)


def _largest(norm: Tensor) -> Tensor:
    """Not every backend's maximum passes NaN on, so that it travels beside."""
    both = torch.stack([norm.nan_to_num(nan=0.0, posinf=math.inf).max(), norm.isnan().any().to(norm)])
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    return torch.where(both[1] > 0, math.nan, both[0])


def _wide(grad: Tensor) -> torch.dtype:
    """At least fp32; complex where the gradient is, whose norm is that of its absolute values."""
    return torch.promote_types(grad.dtype, torch.float32)


@torch.no_grad()
def clip_grad_norm(parameters: list[nn.Parameter], max_norm: float, counted: Counted, device: torch.device) -> Tensor:
    """Scale the gradients of `parameters` so that their norm is at most `max_norm`; returns the norm before."""
    norm = grad_norm(parameters, counted, 2.0, device)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in parameters:
        if parameter.grad is not None:
            grad = local(parameter.grad)
            grad.mul_(factor.to(grad))
    return norm
