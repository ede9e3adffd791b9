"""Optimizer states by parameter name instead of by number: numbers depend on the layout, names do not."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.errors import CheckpointError


def parameter_names(module: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
    """Every name of every parameter, in the order of the plain module."""
    names: dict[nn.Parameter, tuple[str, ...]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[parameter] = (*names.get(parameter, ()), name)
    return names


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """In the order in which `state_dict` numbers them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def labels(parameters: Sequence[nn.Parameter], names: Mapping[nn.Parameter, tuple[str, ...]]) -> list[str]:
    """One name for each parameter; what the module does not know is numbered."""
    return [names[p][0] if p in names else f"(parameter {index})" for index, p in enumerate(parameters)]


def to_names(state: Mapping[str, Any], labels: Sequence[str]) -> dict[str, Any]:
    """A `state_dict` with names in place of numbers."""
    groups = [{**group, "params": [labels[number] for number in group["params"]]} for group in state["param_groups"]]
    entries = {labels[key] if isinstance(key, int) else key: value for key, value in state["state"].items()}
    return {**state, "state": entries, "param_groups": groups}


def to_numbers(state: Mapping[str, Any], aliases: Sequence[Sequence[str]], what: str) -> dict[str, Any]:
    """A named state as the `state_dict` of an optimizer whose parameters have these names, in its own order."""
    groups = state["param_groups"]
    stored = [name for group in groups for name in group["params"]]
    number = {name: index for index, names in enumerate(aliases) for name in names}
    missing = sorted(name for name in stored if name not in number)
    if missing or len(stored) != len(aliases):
        raise CheckpointError(
            f"{what} was saved for {len(stored)} parameters and is now built for {len(aliases)}"
            + (f"; {missing[0]!r} is not among them" if missing else "")
            + ". Build the optimizers for the same parameters as when the checkpoint was saved."
        )
    entries = {number.get(key, key): value for key, value in state["state"].items()}
    numbered = [{**group, "params": [number[name] for name in group["params"]]} for group in groups]
    return {**state, "state": entries, "param_groups": numbered}


def is_parameter_state(value: Any, parameter: nn.Parameter) -> bool:
    """Whether `value` is laid out as `parameter`: one number for each of its elements."""
    return isinstance(value, Tensor) and value.shape == parameter.shape
