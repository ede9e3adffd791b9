"""The local shard of a sharded tensor, and the way back."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor, or the tensor itself. No gradient passes through it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def unsharded(tensor: DTensor) -> Tensor:
    """All elements of `tensor`, where its shard is. Collective.

    An offloaded shard is in host memory, which the backend of its mesh may refuse.
    """
    shard = tensor.to_local()
    if shard.device.type == tensor.device_mesh.device_type:
        return tensor.full_tensor()
    return like(tensor, shard.to(tensor.device_mesh.device_type)).full_tensor().to(shard.device)  # type: ignore[attr-defined,no-any-return]


def like(tensor: Tensor, shard: Tensor) -> Tensor:
    """`shard` as this rank's shard of a tensor that is sharded like `tensor`."""
    if not isinstance(tensor, DTensor):
        return shard
    return DTensor.from_local(
        shard, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
