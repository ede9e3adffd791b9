"""Memory for a module that its author built on the meta device."""

from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_3d.errors import UnsupportedError
from lightning_3d.module.torch_private import own_buffers, own_parameters

ABSENT = "_lightning_3d_absent"
"""Attribute of a meta tensor that stands in for a tensor of another rank."""


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give meta tensors memory on `device` and their first values, those that `reset_parameters` draws.

    Tied parameters stay tied. Warns of submodules without that method, whose values are undefined until a load.
    """
    filled: dict[int, Tensor] = {}
    resettable: list[nn.Module] = []
    bare: list[str] = []
    for name, child in module.named_modules():
        absent = [_fill(child, tensors, device, filled) for tensors in (own_parameters(child), own_buffers(child))]
        if any(absent):
            if callable(getattr(child, "reset_parameters", None)):
                resettable.append(child)
            else:
                bare.append(name or type(child).__name__)
    for child in resettable:
        child.reset_parameters()  # type: ignore[operator]
    if bare:
        rank_zero_warn(
            f"{', '.join(bare[:5])}{', ...' if bare[5:] else ''} were built on meta and have no reset_parameters():"
            f" {len(bare)} submodules of {type(module).__name__} have undefined values until a checkpoint is loaded."
            " Write reset_parameters() for them, or build them on the CPU."
        )


def _fill(module: nn.Module, tensors: dict[str, Any], device: torch.device, filled: dict[int, Tensor]) -> bool:
    absent = [name for name, tensor in tensors.items() if tensor is not None and tensor.is_meta]
    for name in absent:
        old = tensors[name]
        if hasattr(old, ABSENT):
            raise UnsupportedError(
                "An earlier run failed and left the module sharded: some of its blocks were on other ranks, and their"
                " weights are lost with these ranks. Build the module again, or load it from a checkpoint."
            )
        if id(old) not in filled:
            new = torch.empty_like(old, device=device)
            filled[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
        setattr(module, name, filled[id(old)])
    return bool(absent)
