"""Reading a module's class: in which order its methods use its children, and which parameters they use directly.

A guess, read from the bytecode of `forward` and the methods it calls; the rehearsal before training checks it. Modules
are often declared in another order than they run in.
"""

import dis
import inspect
from collections.abc import Iterator
from types import FunctionType

from torch import nn

_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
_FOREIGN = ("torch.", "lightning.", "pytorch_lightning.", "torchmetrics.")


def ordered_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The children in the order in which the class's methods first use them, the rest as declared."""
    declared = dict(module._modules)
    order: dict[str, None] = {}
    if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        order = dict.fromkeys(path[0] for path in attribute_paths(module) if path[0] in declared)
    if len(order) < 2:
        order = {}
    order |= {name: None for name in declared if name not in order}
    return [(name, child) for name in order if (child := declared[name]) is not None]


def direct_parameters(module: nn.Module) -> set[str]:
    """Names of parameters of inner modules that the class's own methods read (`self.wte.weight`)."""
    found = set()
    for path in attribute_paths(module):
        for length in range(2, len(path) + 1):
            owner, name = ".".join(path[: length - 1]), path[length - 1]
            try:
                inner = module.get_submodule(owner)
            except AttributeError:
                break
            if name in inner._parameters and inner._parameters[name] is not None:
                found.add(".".join(path[:length]))
    return found


def attribute_paths(module: nn.Module) -> Iterator[tuple[str, ...]]:
    """Attribute paths (`a.b.c`) that `forward`, `training_step` and what they call read, in order."""
    seen: set[str] = set()
    for method in ("forward", "training_step"):
        yield from _paths(type(module), method, seen)


def _paths(cls: type, method: str, seen: set[str]) -> Iterator[tuple[str, ...]]:
    function = inspect.unwrap(getattr(cls, method, None) or _nothing)
    if method in seen or not isinstance(function, FunctionType) or function.__module__.startswith(_FOREIGN):
        return
    seen.add(method)
    path: list[str] = []
    for instruction in dis.get_instructions(function.__code__):
        if instruction.opname in _ATTRIBUTES:
            path.append(str(instruction.argval))
            continue
        yield from _finish(cls, path, seen)
        path = []
    yield from _finish(cls, path, seen)


def _finish(cls: type, path: list[str], seen: set[str]) -> Iterator[tuple[str, ...]]:
    if not path:
        return
    if isinstance(inspect.getattr_static(cls, path[0], None), FunctionType):
        yield from _paths(cls, path[0], seen)
    else:
        yield tuple(path)


def _nothing() -> None:
    pass
