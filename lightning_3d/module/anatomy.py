"""`Anatomy`: what a module is made of. Reads, changes nothing; works on meta tensors."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from lightning_3d.module.torch_private import own_modules

PRODUCTS = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
"""Layers whose weight and bias autocast casts."""


def is_transposed_linear(kind: type[nn.Module]) -> bool:
    """True for the linear layer of Hugging Face's GPT-2, which has its matrix transposed."""
    return (kind.__module__, kind.__qualname__) == ("transformers.pytorch_utils", "Conv1D")


@dataclass(frozen=True)
class Chain:
    """Modules that run one after the other: the children of an `nn.ModuleList` or `nn.Sequential`."""

    name: str
    """Dotted name of the container ("" for the module itself)."""
    blocks: tuple[str, ...]
    """Dotted names of its children, in order."""
    parameters: int
    """Elements in all of them, each tied parameter counted once."""


@dataclass(frozen=True)
class Anatomy:
    """The parts of a module."""

    chains: tuple[Chain, ...]
    """Outermost containers of blocks that hold parameters, the one with most parameters first."""
    tied: tuple[tuple[str, ...], ...]
    """Groups of parameter names that are one and the same tensor."""
    parameters: int
    """Elements of all parameters, tied ones counted once."""

    @property
    def blocks(self) -> list[str]:
        return [name for chain in self.chains for name in chain.blocks]

    @classmethod
    def of(cls, module: nn.Module) -> "Anatomy":
        chains = sorted(_chains(module, ""), key=lambda chain: -chain.parameters)
        return cls(chains=tuple(chains), tied=tied_parameters(module), parameters=_count(module))


def place_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that owns the parameter or buffer `name`, and its name there, which has dots in TorchRL's losses."""
    head, _, rest = name.partition(".")
    child = own_modules(module).get(head) if rest else None
    return (module, name) if child is None else place_of(child, rest)


def codes_of(kind: type, *names: str) -> Iterator[CodeType]:
    """The code of the methods `names` of `kind`, of functions inside of it, and of methods that it may call."""

    def methods(*called: str) -> list[Any]:
        return [vars(base).get(name) for name in called for base in kind.__mro__]  # `super` reaches all of them

    codes: list[CodeType] = []
    called = methods(*names)
    while called:
        each = called.pop()
        code = inspect.unwrap(each).__code__ if isinstance(each, FunctionType) else each
        if isinstance(code, CodeType) and code not in codes:
            codes.append(code)
            yield code
            called += [*code.co_consts, *methods(*code.co_names)]


def parameter_names(module: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
    """Every name of every parameter, in the order of the plain module."""
    names: dict[nn.Parameter, tuple[str, ...]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[parameter] = (*names.get(parameter, ()), name)
    return names


def tied_parameters(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Names that share one parameter, in the order of `named_parameters`."""
    return tuple(group for group in parameter_names(module).values() if len(group) > 1)


def _chains(module: nn.Module, prefix: str) -> Iterator[Chain]:
    if isinstance(module, nn.ModuleList | nn.Sequential) and _count(module):
        blocks = tuple(f"{prefix}.{name}" if prefix else name for name, _ in module.named_children())
        yield Chain(name=prefix, blocks=blocks, parameters=_count(module))
        return
    for name, child in module.named_children():
        yield from _chains(child, f"{prefix}.{name}" if prefix else name)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
