"""The activations of the blocks of a module: computed again in backward, or in host memory until then.

Copies to and from a device are made in the stream that computes, by pinned memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_3d.activations.recomputed_block import RecomputedForward
from lightning_3d.errors import ConfigurationError, check_one_of
from lightning_3d.module.anatomy import Anatomy
from lightning_3d.module.forward import ForwardLayer, Layer, add_layer
from lightning_3d.module.host_memory import bytes_in, is_on_device
from lightning_3d.module.torch_private import version_of
from lightning_3d.module.undo import UndoStack
from lightning_3d.sandbox.deferred import computed_on_use, is_deferred
from lightning_3d.sandbox.interceptor import storage

RecomputeArgument = Literal["full", "selective", "auto"]


@dataclass(frozen=True)
class Recompute:
    """Which activations of a block backward computes again."""

    mode: RecomputeArgument | None = None
    """None keeps all. "full" keeps what enters a block. "selective" also keeps results of products, attention and
    collectives. "auto" is "full" for as few blocks as the budget allows."""
    budget: int | None = None
    """For "auto": bytes of activations that one rank may keep."""

    @classmethod
    def of(cls, mode: RecomputeArgument | None, budget: str | float | None) -> "Recompute":
        """Check the two arguments of `Strategy3D`."""
        check_one_of("recompute", mode, (None, *get_args(RecomputeArgument)))
        if (mode == "auto") != (budget is not None):
            raise ConfigurationError(
                f"recompute={mode!r} with recompute_budget={budget!r}: the budget is what recompute='auto' needs, and"
                " only that reads it. It is the memory of one rank for activations. Use"
                " recompute='auto', recompute_budget='20GB', or recompute='full' without a budget."
            )
        return cls(mode, None if budget is None else bytes_in(budget, "recompute_budget"))


KEEP_ALL = Recompute()


@dataclass
class RecomputedBlocks:
    """The blocks of one rank that are computed again."""

    blocks: Mapping[str, RecomputedForward]
    choice: Recompute


def recompute_blocks(module: nn.Module, names: Sequence[str], choice: Recompute, undo: UndoStack) -> RecomputedBlocks:
    found = owned_blocks(module, names if choice.mode is not None else ())
    blocks = {name: RecomputedForward(block, name, choice.mode == "selective") for name, block in found.items()}
    for forward in blocks.values():
        add_layer(forward, undo)
    return RecomputedBlocks(blocks, choice)


def owned_blocks(module: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    """Those blocks of `names` that are called and of which this rank has parameters, each by its first name."""
    owned: dict[str, nn.Module] = {}
    for name in names:
        block = module.get_submodule(name)
        new = not any(block is each for each in owned.values()) and type(block).forward is not nn.Module.forward
        if new and any(not parameter.is_meta for parameter in block.parameters()):
            owned[name] = block
    return owned


Context = Callable[[], AbstractContextManager[Any]]


@contextmanager
def one_block_at_a_time(module: nn.Module, blocks: Sequence[str], context: Context) -> Iterator[Context]:
    """Let the code inside train `module`, of which some parameters may be deferred. Yields the context of its steps.

    A module that is built in parts may not fit, and so may its activations and its weights in half precision. Backward
    computes each of its blocks again.
    """
    if not is_deferred(module):
        yield context
        return
    with computed_on_use(module), UndoStack() as undo:
        recompute_blocks(module, blocks, Recompute("full"), undo)
        yield lambda: _uncached(context)


@contextmanager
def _uncached(context: Context) -> Iterator[None]:
    """Enter `context`, in which autocast would keep each weight that it has cast until the end."""
    cached = torch.is_autocast_cache_enabled()
    with context():
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(cached)


SMALL = 2**20
"""Bytes of an activation that is not worth a copy."""


@dataclass(frozen=True)
class OnHost:
    """A copy of an activation, and the device that it came from."""

    copy: Tensor
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "OnHost":
        pinned = is_on_device(tensor)
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
            key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, version_of(tensor)
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
