"""The plan of experts over data ranks: plain data, equal on every rank."""

import inspect
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from lightning_3d.errors import UnsupportedError
from lightning_3d.layout import HALVED_BACKWARD, Layout
from lightning_3d.module.expert_modules import Experts
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
    def line(self) -> str:
        """One line about the experts."""
        counts = sorted({experts.count for experts in self.modules.values()})
        each = " or ".join(f"{count // self.size} of {count}" for count in counts)
        return (
            f"  experts: {each} on each of {self.size} data and context ranks, in {len(self.modules)} of"
            f" {len(self.modules) + len(self.whole)} mixtures; tokens travel to them and back"
        )

    @property
    def splits(self) -> dict[str, TensorSplit]:
        """The division of each parameter."""
        return {
            f"{name}.{own}": TensorSplit.even(0, experts.count, self.size)
            for name, experts in self.modules.items()
            for own in experts.parameters
        }


def check_layout(layout: Layout, shard_size: int | None, compression: str | None) -> None:
    """Raise for settings under which ranks cannot share experts."""
    if layout.expert_parallel_size == 1:
        return
    refused = {
        f"zero_shard_size={shard_size}": shard_size not in (None, layout.data_parallel_size),
        f"grad_compression={compression!r}": compression is not None,
        "offload of parameters": layout.offload == "all",
        "sequence_parallel": layout.sequence_parallel,
        f"schedule={layout.schedule!r}": layout.pipelined and layout.schedule in HALVED_BACKWARD,
    }
    for what, used in refused.items():
        if used:
            raise UnsupportedError(
                f"expert_parallel_size={layout.expert_parallel_size} together with {what} is not supported: it was"
                " never compared with one device. Leave one of the two out."
            )


def divided(module: nn.Module, experts: Experts) -> DividedExperts:
    """The division of `experts`, which `module` has."""
    part = module.get_submodule(experts.name)
    numbers = [name for name, value in vars(part).items() if type(value) is int and value == experts.count]
    named = [name for name in numbers if "expert" in name]
    own = (name.removeprefix(f"{experts.name}.") for name in experts.parameters)
    return DividedExperts(experts.count, tuple(own), tuple(named or numbers))


def arguments_of(module: nn.Module) -> list[str]:
    """The arguments of the forward of `module`: hidden states, numbers of experts, their weights."""
    return list(inspect.signature(module.forward).parameters)[:3]


def is_shared_outside(module: nn.Module, experts: nn.Module) -> bool:
    """True where other code of `module` has a parameter of `experts` too."""

    def counted(of: nn.Module) -> Counter[int]:
        return Counter(id(p) for part in of.modules() for p in part.parameters(recurse=False))

    everywhere, inside = counted(module), counted(experts)
    return any(everywhere[key] != number for key, number in inside.items())
