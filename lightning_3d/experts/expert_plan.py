"""The plan of experts over data ranks: plain data, equal on every rank."""

import dis
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from types import CodeType
from typing import Any

from torch import nn

from lightning_3d.module.anatomy import codes_of
from lightning_3d.module.expert_modules import Experts, ExpertsKind
from lightning_3d.tensor.geometry import TensorSplit


@dataclass(frozen=True)
class DividedExperts:
    """A module that computes `experts(hidden, index, weights)`, calls the experts of a list, or multiplies all."""

    count: int
    """Experts of all ranks."""
    parameters: tuple[str, ...]
    """Names in the module. Each has a row for each expert, or belongs to one expert of the list, in their order."""
    numbers: tuple[str, ...] = ()
    """Attributes of the module that are the count."""
    listed: str = ""
    """The list of experts in the module, empty where parameters have a row for each."""
    rows: tuple[int, ...] = ()
    """Of each parameter of listed experts."""
    width: int = 0
    """Numbers of a row that a listed expert gets, and of its result."""
    gathered: bool = False
    """True where code multiplies all experts at once: they travel, and tokens stay."""

    @property
    def copied(self) -> bool:
        """True where ranks that own the same experts have copies of them, and no shards."""
        return self.gathered or bool(self.listed)

    def splits(self, ranks: int) -> dict[str, TensorSplit]:
        """The division of each parameter. One of a listed expert is whole on one rank, and has no rows on others."""
        if not self.listed:
            return {name: TensorSplit.even(0, self.count, ranks) for name in self.parameters}
        own = len(self.parameters) // ranks
        owners = [
            tuple(((0, rows if at // own == rank else 0),) for rank in range(ranks))
            for at, rows in enumerate(self.rows)
        ]
        return {name: TensorSplit(0, pieces) for name, pieces in zip(self.parameters, owners, strict=True)}


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
        counts = sorted({experts.count for experts in self.modules.values()})
        each = " or ".join(f"{count // self.size} of {count}" for count in counts)
        gathered = {experts.gathered for experts in self.modules.values()}
        names = (name.split(".") for name, experts in self.modules.items() if experts.gathered)
        at = sorted({".".join("*" if part.isdigit() else part for part in name) for name in names})
        travels = {
            False: "tokens travel to them and back",
            True: f"gathered where code multiplies all at once ({', '.join(at)})",
        }
        return (
            f"  experts: {each} on each of {self.size} data and context ranks, in {len(self.modules)} of"
            f" {len(self.modules) + len(self.whole)} mixtures; {'; '.join(travels[one] for one in sorted(gathered))}"
        )

    @property
    def splits(self) -> dict[str, TensorSplit]:
        return {
            f"{name}.{own}": split
            for name, experts in self.modules.items()
            for own, split in experts.splits(self.size).items()
        }


def name_of_divided(experts: Experts) -> str:
    """The module whose forward is replaced: the one that calls the experts of a list, or that has the parameters."""
    return experts.name.rpartition(".")[0] if experts.kind is ExpertsKind.LISTED else experts.name


def divided(module: nn.Module, experts: Experts) -> DividedExperts:
    """The division of `experts`, which `module` has."""
    part = module.get_submodule(name_of_divided(experts))
    if experts.kind is ExpertsKind.LISTED:
        prefix, _, listed = experts.name.rpartition(".")
        names = tuple(name.removeprefix(f"{prefix}.") for name in experts.parameters)
        rows = tuple(part.get_parameter(name).shape[:1].numel() for name in names)
        return DividedExperts(experts.count, names, listed=listed, rows=rows)
    numbers = [name for name, value in vars(part).items() if type(value) is int and value == experts.count]
    named = [name for name in numbers if "expert" in name]
    own = tuple(name.removeprefix(f"{experts.name}.") for name in experts.parameters)
    if experts.kind is ExpertsKind.STACKED:
        return DividedExperts(experts.count, own, gathered=True)
    return DividedExperts(experts.count, own, tuple(named or numbers))


def is_shared_outside(module: nn.Module, experts: nn.Module) -> bool:
    """True where other code of `module` has a parameter of `experts` too."""

    def counted(of: nn.Module) -> Counter[int]:
        return Counter(id(p) for part in of.modules() for p in part.parameters(recurse=False))

    everywhere, inside = counted(module), counted(experts)
    return any(everywhere[key] != number for key, number in inside.items())


def has_two_holders(module: nn.Module, experts: nn.Module) -> bool:
    """True where more than one module of `module` has `experts`, or a part of them, as its own part."""
    inside = set(experts.modules())
    return sum(not inside.isdisjoint(each.children()) for each in module.modules() if each not in inside) > 1


def is_named_around(module: nn.Module, experts: Experts) -> bool:
    """True where a module around has the name of a parameter as a value: adapters of PEFT add to all rows by it."""
    own, path = {name.rpartition(".")[2] for name in experts.parameters}, experts.name.split(".")
    around = (module.get_submodule(".".join(path[:depth])) for depth in range(len(path)))
    return any(isinstance(value, str) and value in own for each in around for value in vars(each).values())


def is_read_outside(module: nn.Module, experts: Experts) -> bool:
    """True where the forward or step of another part of `module`, or a method that it calls, names their parameters."""
    if experts.kind is ExpertsKind.LISTED:
        return False
    names = {tuple(name.split(".")[-2:]) for name in experts.parameters}
    inside = set(module.get_submodule(experts.name).modules())
    return any(_reads(kind, names) for kind in {type(part) for part in module.modules() if part not in inside})


def _reads(kind: type, names: set[tuple[str, ...]]) -> bool:
    codes = codes_of(kind, "forward", "training_step")
    return any(not names.isdisjoint(pairwise(_loaded(code))) for code in codes)


@cache  # the mixtures of all layers ask about the same classes, and those of a small Mixtral take 0.1 s
def _loaded(code: CodeType) -> list[Any]:
    loads = [step.argval for step in dis.get_instructions(code) if step.opname.startswith("LOAD_")]
    return [name for each in loads for name in (each if isinstance(each, tuple) else (each,))]
