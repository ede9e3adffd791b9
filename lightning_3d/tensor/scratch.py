"""Throw-away copies of a block to try things on: on the CPU, in fp32 (fp64 where it is so), with random parameters.

Random, because fresh parameters are often zero (biases, the second matrix of an adapter, the last layer of a residual
branch), and where a weight is zero every split of its neighbours looks right.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.tensor.attention import use_open_attention
from lightning_3d.tensor.sample import working_dtype


def scratch_copy(module: nn.Module, seed: int, *, opened: bool = True) -> nn.Module:
    """`module` with random parameters of its own; the original, which may live on meta, is not touched.

    Args:
        module: the block.
        seed: of its parameters.
        opened: with torch's attention opened up; without, all code is as its author wrote it.
    """
    generator = torch.Generator().manual_seed(seed)
    memo: dict[int, Any] = {}
    for name, parameter in module.named_parameters():
        memo[id(parameter)] = nn.Parameter(
            _random(name, parameter, generator), requires_grad=parameter.is_floating_point()
        )
    for buffer in module.buffers():
        memo[id(buffer)] = _buffer(buffer)
    memo |= _computed(module)
    for child in module.modules():
        # A LightningModule knows its trainer, which knows everything else; a copy of a forward needs neither.
        for held in (child.__dict__.get("_trainer"), child.__dict__.get("_fabric")):
            if held is not None:
                memo[id(held)] = object()
    twin = copy.deepcopy(module, memo)
    if opened:
        use_open_attention(twin, lambda owner, name, value: owner.__dict__.update({name: value}))
    return twin


def shard_copy(scratch: nn.Module, local: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """The structure of `scratch` again, with `local(name, value)` for its parameters; unchanged values are not
    copied."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(local(name, parameter.detach()), requires_grad=parameter.requires_grad)
        for name, parameter in scratch.named_parameters()
    }
    return copy.deepcopy(scratch, memo | _computed(scratch))


def _computed(module: nn.Module) -> dict[int, Any]:
    """Results that modules keep (a state, a reparametrized weight), which autograd does not let anybody copy."""
    kept = (value for child in module.modules() for value in child.__dict__.values())
    return {id(value): value.detach().clone() for value in kept if isinstance(value, Tensor) and not value.is_leaf}


def names_of(module: nn.Module) -> Mapping[int, str]:
    """The first name of every parameter, by identity."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def _random(name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    if not parameter.is_floating_point():
        return parameter.detach().to("cpu", copy=True)
    values = torch.randn(parameter.shape, generator=generator).to(working_dtype(parameter.dtype))
    if parameter.dim() > 1:
        return values / parameter.shape[-1] ** 0.5
    return values.mul_(0.1) if "bias" in name.rsplit(".", 1)[-1] else values.mul_(0.3).add_(1.0)


def _buffer(buffer: Tensor) -> Tensor:
    dtype = working_dtype(buffer.dtype)
    if buffer.is_meta:
        return torch.ones(buffer.shape, dtype=dtype)
    return buffer.detach().to("cpu", dtype, copy=True)
