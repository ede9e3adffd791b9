"""DTensors from shards and back, without the checks and the autograd functions of torch's public ones.

`DTensor.from_local` takes five times as long, for each gradient in each step. Read in torch 2.13.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def spec_of(tensor: DTensor) -> Any:
    return tensor._spec


def shard_of(tensor: DTensor) -> Tensor:
    """This rank's shard: the very tensor that `tensor` has, without a graph."""
    return tensor._local_tensor


def own_memory(tensor: DTensor) -> None:
    """Give `tensor` memory that it shares with no other."""
    tensor._local_tensor = tensor._local_tensor.clone()


def from_spec(spec: Any, shard: Tensor) -> DTensor:
    """`shard` as this rank's shard of a tensor of its dtype with `spec`. Gradients pass where they are on."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return DTensor.from_local(
            shard, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )
    return DTensor(shard, spec, requires_grad=False)


def at_rest(
    shard: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """`shard` as a DTensor where it is. `DTensor.from_local` would move it to the device of the mesh."""
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, shard.dtype))
    return DTensor(shard.detach(), spec, requires_grad=False)


def deep_copy(tensor: DTensor, memo: dict[int, Any]) -> Tensor:
    """`copy.deepcopy` of a shard, without its gradient, as that of a parameter on one device.

    torch (2.13) copies the gradient too, and takes a shard inside of a buffer (FSDP2's gradients) for a plain tensor.
    """
    if not tensor.is_leaf:
        return Tensor.__deepcopy__(tensor, memo)
    with torch._C.DisableTorchFunction():
        copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    copied.__dict__.update(deepcopy(tensor.__dict__, memo))  # what makes it a parameter
    return copied


def forget_meshes(device_type: str) -> None:
    """Forget the results of operations, which DTensor keeps by mesh: equal meshes may have other process groups.

    Each thread has its own, and gradients on a device that is not the CPU are computed in another thread.
    """
    _clear_sharding_prop_cache()
    probe = torch.zeros((), device=device_type, requires_grad=True)
    probe.register_hook(lambda _: _clear_sharding_prop_cache())
    torch.autograd.backward(probe)  # not a call of `backward` that a user counts
