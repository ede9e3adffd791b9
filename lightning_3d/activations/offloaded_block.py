"""Blocks whose activations are in host memory between forward and backward.

Copies to and from a device are made in the stream that computes, by pinned memory.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_3d.activations.recompute_blocks import owned_blocks
from lightning_3d.module.anatomy import Anatomy
from lightning_3d.module.forward import ForwardLayer, Layer, add_layer
from lightning_3d.module.undo import UndoStack
from lightning_3d.sandbox.interceptor import storage

SMALL = 2**20
"""Bytes of an activation that is not worth a copy."""


@dataclass(frozen=True)
class OnHost:
    """A copy of an activation, and the device that it came from."""

    copy: Tensor
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "OnHost":
        pinned = tensor.device.type == "cuda"
        copy = torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)
        copy.copy_(tensor.detach(), non_blocking=pinned)
        return cls(copy, tensor.device)

    def back(self) -> Tensor:
        return self.copy.to(self.device, non_blocking=True)


class OffloadedForward(ForwardLayer, rank=Layer.OFFLOAD):
    """The forward of a block that moves to the host what its backward needs. Weights stay where they are."""

    bytes = 0
    """Of the last call, on the host."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.next(*args, **kwargs)
        weights = {storage(parameter) for parameter in self.module.parameters()}
        copies: dict[Any, tuple[Tensor, OnHost]] = {}
        """With the tensors: while one is alive, no other has its memory."""
        self.bytes = 0

        def pack(tensor: Tensor) -> Any:
            if type(tensor) is not Tensor or tensor.nbytes < SMALL or storage(tensor) in weights:
                return tensor
            key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version
            if key not in copies:
                copies[key] = tensor, OnHost.of(tensor)
                self.bytes += tensor.nbytes
            return copies[key][1]

        with saved_tensors_hooks(pack, _unpack):
            result = self.next(*args, **kwargs)
        copies.clear()
        return result


def _unpack(packed: Any) -> Tensor:
    unpacked: Tensor = packed.back() if isinstance(packed, OnHost) else packed
    return unpacked


def offload_activations(module: nn.Module, anatomy: Anatomy, undo: UndoStack) -> None:
    """Put an `OffloadedForward` around each of the `owned_blocks`."""
    for block in owned_blocks(module, anatomy.blocks).values():
        add_layer(OffloadedForward(block), undo)
