"""Functions of torch that ask C++ what a backend in Python cannot say: they ask here for the card."""

from typing import Any

import torch
from torch import Tensor

from tests.device import streams
from tests.device.streams import NAME


def register() -> None:
    _storages()
    _pinned_memory()
    torch.Event = _Event
    torch.accelerator.current_stream = streams.current
    torch.accelerator.synchronize = streams.synchronize
    _data()


def _data() -> None:
    """Let tensors of the card and of the host take each other's place, as those of CUDA do."""
    data: Any = torch._C.TensorBase.data
    compatible = torch._has_compatible_shallow_copy_type

    def cross(one: Tensor, other: Tensor) -> bool:
        return {one.device.type, other.device.type} == {NAME, "cpu"}

    def replace(self: Tensor, new: Tensor) -> None:
        if cross(self, new):
            grad = self.grad if self.is_leaf else None
            torch._C._swap_tensor_impl(self, new.detach().requires_grad_(self.requires_grad))
            self.grad = None if grad is None else grad.to(new.device)
        else:
            data.__set__(self, new)

    torch.Tensor.data = property(data.__get__, replace)
    torch._has_compatible_shallow_copy_type = lambda one, other: cross(one, other) or compatible(one, other)


class _Event(torch.Event):
    """That of the card for the card."""

    def __new__(cls, device: Any = None, **options: Any) -> Any:
        if device is None or torch.device(device).type == NAME:
            return streams.Event()
        return super().__new__(cls, device, **options)


def _storages() -> None:
    """Let storages of the card have no bytes for a while."""
    storage: Any = torch.UntypedStorage
    resize, size, nbytes = storage.resize_, storage.size, storage.nbytes

    def resized(self: Any, count: int) -> Any:
        if not hasattr(self, "memory"):
            return resize(self, count)
        if not count:  # whoever reads it later reads what others have there by then
            torch.empty(0, dtype=torch.uint8).set_(self.memory.host, 0, (self.memory.capacity,)).fill_(0xFF)
        self.memory.resize(count)
        return self

    storage.resize_ = resized
    storage.size = lambda self: self.memory.size if hasattr(self, "memory") else size(self)
    storage.nbytes = lambda self: self.memory.size if hasattr(self, "memory") else nbytes(self)


def _pinned_memory() -> None:
    """Let tensors of the host be pinned: they know it."""

    def pinned(tensor: Tensor, device: Any = None) -> Tensor:
        copy = tensor.clone()
        copy.untyped_storage().pinned = True
        return copy

    def making(function: Any) -> Any:
        def make(*args: Any, pin_memory: bool = False, **options: Any) -> Tensor:
            made = function(*args, **options)
            if pin_memory:
                made.untyped_storage().pinned = True
            return made

        return make

    torch.Tensor.pin_memory = pinned
    torch.Tensor.is_pinned = lambda self, device=None: hasattr(self.untyped_storage(), "pinned")
    for name in ("empty", "empty_like", "zeros", "empty_strided"):
        setattr(torch, name, making(getattr(torch, name)))
