"""The state of the module and its optimizers in one piece, whatever the layout, and back."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

Convert = Callable[[nn.Parameter, Tensor], Tensor]
"""What a tensor shaped like the parameter becomes: whole, or this rank's part."""


def module_state(module: nn.Module, whole: Convert) -> dict[str, Any]:
    """`module.state_dict()` with whole tensors. Collective."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    return {
        name: whole(parameters[name], value) if name in parameters else value
        for name, value in module.state_dict().items()
    }


def load_module_state(module: nn.Module, state: Mapping[str, Any], part: Convert, strict: bool) -> None:
    """`module.load_state_dict(state)` where `state` holds whole tensors."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    parts = {
        name: part(parameters[name], value) if name in parameters and value.shape == parameters[name].shape else value
        for name, value in state.items()
    }
    module.load_state_dict(parts, strict=strict)


def optimizer_state(optimizer: Optimizer, whole: Convert) -> dict[str, Any]:
    """`optimizer.state_dict()` with whole tensors. Collective."""
    state = optimizer.state_dict()
    return _converted(optimizer, state, whole)


def load_optimizer_state(optimizer: Optimizer, state: Mapping[str, Any], part: Convert) -> None:
    """`optimizer.load_state_dict(state)` where `state` holds whole tensors."""
    optimizer.load_state_dict(_converted(optimizer, state, part))


def _converted(optimizer: Optimizer, state: Mapping[str, Any], convert: Convert) -> dict[str, Any]:
    """`state` with the entries that are numbered by parameter converted."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    entries = {
        key: {k: _convert(parameters[key], v, convert) for k, v in value.items()} if isinstance(key, int) else value
        for key, value in state.get("state", {}).items()
    }
    return {**state, "state": entries} if "state" in state else dict(state)


def _convert(parameter: nn.Parameter, value: Any, convert: Convert) -> Any:
    same = isinstance(value, Tensor) and value.shape == parameter.shape
    return convert(parameter, value) if same else value


@torch.no_grad()
def swap_parameters(
    optimizers: Sequence[Optimizer], swaps: Mapping[nn.Parameter, nn.Parameter], convert: Convert
) -> None:
    """Have `optimizers` hold the new parameters in place of the old, with their state converted."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [swaps.get(parameter, parameter) for parameter in group["params"]]
        for old in [parameter for parameter in swaps if parameter in optimizer.state]:
            state = optimizer.state.pop(old)
            optimizer.state[swaps[old]] = {key: _convert(old, value, convert) for key, value in state.items()}


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
