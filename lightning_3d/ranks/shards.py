"""The local shard of a sharded tensor, the axes that shard it, and the way back."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from lightning_3d.ranks.dtensor_private import at_rest


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor, or the tensor itself. No gradient passes through it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_axes(tensor: Tensor) -> dict[str, tuple[int, Placement]]:
    """The axes that shard `tensor`, by name: the dimension of the mesh, and the way in which it shards."""
    if not isinstance(tensor, DTensor):
        return {}
    names = tensor.device_mesh.mesh_dim_names or tuple(map(str, range(tensor.device_mesh.ndim)))
    axes = zip(names, enumerate(tensor.placements), strict=True)
    return {name: (at, how) for name, (at, how) in axes if not isinstance(how, Replicate)}


def unsharded(tensor: DTensor) -> Tensor:
    """All elements of `tensor`, where its shard is. Collective.

    An offloaded shard is in host memory, which the backend of its mesh may refuse.
    """
    shard = tensor.to_local()
    if shard.device.type == tensor.device_mesh.device_type:
        return tensor.full_tensor()
    return like(tensor, shard.to(tensor.device_mesh.device_type)).full_tensor().to(shard.device)  # type: ignore[attr-defined]


def complete(tensor: DTensor) -> DTensor:
    """`tensor` with the sums, or norms, of which each rank has a part. Collective where there are any."""
    placements = [Replicate() if each.is_partial() else each for each in tensor.placements]
    return tensor if placements == [*tensor.placements] else tensor.redistribute(placements=placements)


def like(tensor: Tensor, shard: Tensor) -> Tensor:
    """`shard` as this rank's shard of a tensor that is sharded like `tensor`."""
    if not isinstance(tensor, DTensor):
        return shard
    return on_mesh(shard, tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())


def on_mesh(
    shard: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """`shard` as this rank's shard of a tensor of that `shape`. In host memory it stays there."""
    if shard.device.type not in (mesh.device_type, "meta"):
        return at_rest(shard, mesh, placements, shape, stride)
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=shape, stride=stride)
