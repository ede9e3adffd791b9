"""Memory for a module that its author built on the meta device."""

from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_3d.errors import UnsupportedError

ABSENT = "_lightning_3d_absent"
"""Attribute of a tensor on meta that stands in for one of another rank: it has values, elsewhere."""


def materialize(module: nn.Module, device: torch.device) -> None:
    """Give what is on meta memory on `device` and its first values, those that `reset_parameters` draws.

    Tied parameters stay tied. The user is told of parts that have no such method: they hold whatever the memory held
    until a checkpoint is loaded.
    """
    made: dict[int, Tensor] = {}
    begun: list[nn.Module] = []
    bare: list[str] = []
    for name, part in module.named_modules():
        found = [_fill(tensors, device, made) for tensors in (part._parameters, part._buffers)]
        if any(found):
            if callable(getattr(part, "reset_parameters", None)):
                begun.append(part)
            else:
                bare.append(name or type(part).__name__)
    for part in begun:
        part.reset_parameters()  # type: ignore[operator]
    if bare:
        rank_zero_warn(
            f"{', '.join(bare[:5])}{', ...' if bare[5:] else ''} were built on meta and have no reset_parameters():"
            f" {len(bare)} parts of {type(module).__name__} have no values until a checkpoint gives them some. Write"
            " reset_parameters() for them, or build them on the CPU."
        )


def _fill(tensors: dict[str, Any], device: torch.device, made: dict[int, Tensor]) -> bool:
    absent = [name for name, tensor in tensors.items() if tensor is not None and tensor.is_meta]
    for name in absent:
        old = tensors[name]
        if hasattr(old, ABSENT):
            raise UnsupportedError(
                "An earlier run failed and left the module in parts: blocks of it were on other ranks, whose weights"
                " are gone with them. Build the module anew, or load it from a checkpoint."
            )
        if id(old) not in made:
            new = torch.empty_like(old, device=device)
            made[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
        tensors[name] = made[id(old)]
    return bool(absent)
