"""What this rank holds of a tensor that ranks share, and the way back."""

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a shared tensor, or the tensor itself. To compute gradients through it, see
    `tensor.collectives.local_shard`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, part: Tensor) -> Tensor:
    """`part` as what this rank holds of a tensor that is laid out as `tensor` is."""
    if not isinstance(tensor, DTensor):
        return part
    return DTensor.from_local(
        part, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
