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
    """The children in the order in which the class's methods first use them.

    One that is not seen there (`getattr(self, f"block_{i}")`) follows the one that is declared before it.
    """
    declared = dict(module._modules)
    order: list[str] = []
    if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        order = list(dict.fromkeys(path[0] for path in attribute_paths(module) if path[0] in declared))
    if len(order) < 2:
        order = []
    for before, name in zip([None, *declared], declared, strict=False):
        if name not in order:
            order.insert(order.index(before) + 1 if before is not None else 0, name)
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
    for path in _evaluated(function):
        yield from _expand(cls, path, seen)


def _evaluated(function: FunctionType) -> Iterator[tuple[str, ...]]:
    """Attribute paths in the order in which they are called or used: in `self.b(self.a(x))`, `a` comes first.

    Follows the depth of the interpreter's stack; paths wait at their place on it until something consumes them.
    """
    waiting: dict[int, tuple[str, ...]] = {}
    depth = 0
    for instruction in dis.get_instructions(function):
        if instruction.is_jump_target:
            yield from (waiting.pop(place) for place in sorted(waiting))
        opcode, argument = instruction.opcode, instruction.arg
        effect = dis.stack_effect(opcode, argument, jump=False)
        if instruction.opname in _ATTRIBUTES:
            waiting[depth - 1] = (*waiting.get(depth - 1, ()), str(instruction.argval))
        else:
            used = sorted(place for place in waiting if place >= min(depth, depth + effect - 1))
            if instruction.opname.startswith("CALL") and used:
                used = [*used[1:], used[0]]
            yield from (waiting.pop(place) for place in used)
        depth += effect
    yield from waiting.values()


def _expand(cls: type, path: tuple[str, ...], seen: set[str]) -> Iterator[tuple[str, ...]]:
    """A method of the class itself stands for the paths that it uses."""
    if isinstance(inspect.getattr_static(cls, path[0], None), FunctionType):
        yield from _paths(cls, path[0], seen)
    else:
        yield path


def _nothing() -> None:
    pass
