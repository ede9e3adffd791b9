"""The plan of experts over data ranks: plain data, equal on every rank."""

import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from lightning_3d.tensor.geometry import TensorSplit


@dataclass(frozen=True)
class DividedExperts:
    """A module that computes `experts(hidden, index, weights)` with parameters that have a row for each expert."""

    count: int
    """Experts of all ranks."""
    parameters: tuple[str, ...]
    """Names in the module."""
    numbers: tuple[str, ...]
    """Attributes of the module that are the count."""


@dataclass(frozen=True)
class ExpertPlan:
    """The experts of a module that are divided among data and context ranks."""

    size: int
    """Ranks that share the experts."""
    modules: Mapping[str, DividedExperts]
    """By name."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """Modules with experts that every rank has, and why."""

    @property
    def splits(self) -> dict[str, TensorSplit]:
        """The division of each parameter."""
        return {
            f"{name}.{own}": TensorSplit.even(0, experts.count, self.size)
            for name, experts in self.modules.items()
            for own in experts.parameters
        }


def called_with_routes(module: nn.Module) -> DividedExperts | None:
    """The experts of a module whose forward takes hidden states, the experts of each token and their weights."""
    parameters = dict(module.named_parameters())
    rows = {parameter.shape[:1] for parameter in parameters.values()}
    if len(rows) != 1 or not (first := rows.pop()) or first[0] < 2 or len(arguments_of(module)) != 3:
        return None
    if all(parameter.dim() < 3 for parameter in parameters.values()):
        return None
    numbers = [name for name, value in vars(module).items() if type(value) is int and value == first[0]]
    named = [name for name in numbers if "expert" in name]
    return DividedExperts(first[0], tuple(parameters), tuple(named or numbers))


def arguments_of(module: nn.Module) -> list[str]:
    """The arguments of the forward of `module`."""
    try:
        arguments = inspect.signature(module.forward).parameters.values()
    except ValueError:  # a builtin
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [each.name for each in arguments if each.kind in kinds]


def is_shared_outside(module: nn.Module, experts: nn.Module) -> bool:
    """True where other code of `module` has a parameter of `experts` too."""
    def counted(of: nn.Module) -> Counter[int]:
        return Counter(id(p) for part in of.modules() for p in part.parameters(recurse=False))
    everywhere, inside = counted(module), counted(experts)
    return any(everywhere[key] != number for key, number in inside.items())
