"""Scratch copies of a block for proofs: on the CPU, in fp32 (fp64 stays fp64), with random parameters.

Fresh parameters are often zero (biases, the second matrix of an adapter, the last layer of a residual branch). Where a
weight is zero, every split of its neighbours computes the same, so the copies have random ones.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.launch.lightning_private import runs_of
from lightning_3d.module.torch_private import own_parameters
from lightning_3d.module.undo import UndoStack
from lightning_3d.sandbox.trees import copies_of_computed
from lightning_3d.tensor.attention import use_open_attention
from lightning_3d.tensor.sample import working_dtype

GAIN = 0.5
"""Size of a product's results, for inputs of size 1. With 1 a residual stream of 18 layers grows so much that it hides
an error of the last one."""
TRANSPOSED = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d


def scratch_copy(module: nn.Module, seed: int, *, opened: bool = True) -> nn.Module:
    """A copy of `module`, which may be on meta, with random parameters. Where it is `opened`, an `OpenAttention`
    replaces torch's attention. Otherwise all code is its author's.
    """
    generator = torch.Generator().manual_seed(seed)
    memo: dict[int, Any] = {}
    terms = _terms(module)
    for name, parameter in module.named_parameters():
        memo[id(parameter)] = nn.Parameter(
            _random(name, parameter, terms[name], generator), requires_grad=parameter.is_floating_point()
        )
    for buffer in module.buffers():
        memo[id(buffer)] = _buffer(buffer)
    memo |= copies_of_computed(module)
    for child in module.modules():
        # A LightningModule references its trainer, and so everything else. The copy of a forward needs neither.
        memo |= {id(held): object() for held in runs_of(child)}
    twin = copy.deepcopy(module, memo)
    return _open(twin) if opened else twin


def opened_copy(scratch: nn.Module) -> nn.Module:
    """A copy of `scratch` with the memory of its parameters, in which an `OpenAttention` replaces torch's attention."""
    return _open(shard_copy(scratch, lambda _, value: value))


def _open(scratch: nn.Module) -> nn.Module:
    use_open_attention(scratch, UndoStack())
    return scratch


def shard_copy(scratch: nn.Module, local: Callable[[str, Tensor], Tensor]) -> nn.Module:
    """A copy of `scratch` with `local(name, value)` for its parameters. Unchanged values are not copied."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(local(name, parameter.detach()), requires_grad=parameter.requires_grad)
        for name, parameter in scratch.named_parameters()
    }
    return copy.deepcopy(scratch, memo | copies_of_computed(scratch))


def names_of(module: nn.Module) -> Mapping[int, str]:
    """The first name of every parameter, by identity."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def _terms(module: nn.Module) -> dict[str, int]:
    """The number of products in a sum, for each parameter: of a matrix its columns, of a kernel all but its outputs."""
    found = {
        name: parameter.shape[1:].numel() if parameter.dim() > 3 else parameter.shape[-1] if parameter.dim() else 1
        for name, parameter in module.named_parameters()
    }
    for name, child in module.named_modules():
        weight = own_parameters(child).get("weight") if isinstance(child, (nn.Conv1d, *TRANSPOSED)) else None
        if weight is not None:
            channels = weight.shape[0] // child.groups if isinstance(child, TRANSPOSED) else weight.shape[1]
            found[f"{name}.weight" if name else "weight"] = channels * weight.shape[2:].numel()
    return found


def _random(name: str, parameter: Tensor, terms: int, generator: torch.Generator) -> Tensor:
    """Random values of a parameter whose results are sums of `terms` products."""
    if not parameter.is_floating_point():
        return parameter.detach().to("cpu", copy=True)
    values = torch.randn(parameter.shape, generator=generator).to(working_dtype(parameter.dtype))
    if parameter.dim() > 1:
        return values * (GAIN / max(1, terms) ** 0.5)
    return values.mul_(0.1) if "bias" in name.rsplit(".", 1)[-1] else values.mul_(0.3).add_(1.0)


def _buffer(buffer: Tensor) -> Tensor:
    dtype = working_dtype(buffer.dtype)
    if buffer.is_meta:
        return torch.ones(buffer.shape, dtype=dtype)
    return buffer.detach().to("cpu", dtype, copy=True)
