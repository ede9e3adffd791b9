"""The state of the module and its optimizers in one piece, whatever the layout, and back.

While a module is sharded, `state_dict()` of it, of any of its parts and of its optimizers still gives whole tensors,
and `load_state_dict()` takes them, so that checkpoints and the user's own code see what they would on one device.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

Convert = Callable[[nn.Parameter, Tensor], Tensor]
"""What a tensor shaped like the parameter becomes: whole, or this rank's part."""
Meet = Callable[[str], None]
"""Raises unless every rank asks for the same now: making a tensor whole takes all of them."""


def whole_module_state(module: nn.Module, whole: Convert, part: Convert, meet: Meet) -> list[RemovableHandle]:
    """Have `state_dict()` gather and `load_state_dict()` deal out, in `module` and everything below it."""
    handles: list[RemovableHandle] = [
        module.register_state_dict_pre_hook(lambda *_: meet("state_dict() of the module"))
    ]

    def gather(owner: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        for name, parameter in owner._parameters.items():
            if isinstance(state.get(prefix + name), DTensor) and parameter is not None:
                state[prefix + name] = whole(parameter, state[prefix + name])

    def deal_out(owner: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        for name, parameter in owner._parameters.items():
            if parameter is not None and prefix + name in state:
                state[prefix + name] = _convert(parameter, state[prefix + name], part)

    for owner in module.modules():
        if any(isinstance(parameter, DTensor) for parameter in owner._parameters.values()):
            handles.append(owner.register_state_dict_post_hook(gather))
            handles.append(owner.register_load_state_dict_pre_hook(deal_out))
    return handles


def whole_optimizer_state(optimizer: Optimizer, whole: Convert, part: Convert, meet: Meet) -> list[RemovableHandle]:
    """Have `state_dict()` gather and `load_state_dict()` deal out, in `optimizer`."""

    def gather(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        meet("state_dict() of an optimizer")
        return _converted(optimizer, state, whole)

    def deal_out(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return _converted(optimizer, state, part)

    return [optimizer.register_state_dict_post_hook(gather), optimizer.register_load_state_dict_pre_hook(deal_out)]


def _converted(optimizer: Optimizer, state: Mapping[str, Any], convert: Convert) -> dict[str, Any]:
    """`state` with the entries that are numbered by parameter converted."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    entries = {
        key: {k: _convert(parameters[key], v, convert) for k, v in value.items()} if isinstance(key, int) else value
        for key, value in state.get("state", {}).items()
    }
    return {**state, "state": entries}


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
