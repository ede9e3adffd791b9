"""Which modules are planned one at a time: the blocks of the module, or the smallest things that hold two products."""

from collections.abc import Iterator

from torch import nn

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_units(module: nn.Module) -> list[str]:
    """Names of the blocks, outermost first; nothing that they hold is listed again, and none under a second name."""
    names: dict[int, str] = {}
    for name in _units(module, ""):
        names.setdefault(id(module.get_submodule(name)), name)
    return list(names.values())


def _units(module: nn.Module, name: str) -> list[str]:
    found: list[str] = []
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        is_block = isinstance(module, CONTAINERS) and not isinstance(child, CONTAINERS) and matrices(child) > 1
        found += [full] if is_block else _units(child, full)
    if not found and matrices(module) > 1 and not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [name]
    return found


def matrices(module: nn.Module) -> int:
    """How many parameters could be the matrix of a product."""
    return sum(
        parameter.dim() > 1
        for owner in module.modules()
        if not isinstance(owner, nn.Embedding)
        for parameter in owner._parameters.values()
        if parameter is not None
    )


def structure(module: nn.Module) -> tuple[object, ...]:
    """Equal for modules of one kind: the same classes, with parameters and buffers of the same shapes."""
    return tuple(_describe(module))


def _describe(module: nn.Module) -> Iterator[object]:
    first: dict[int, str] = {}
    for name, child in module.named_modules():
        yield name, type(child)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield name, tuple(parameter.shape), first.setdefault(id(parameter), name)
    for name, buffer in module.named_buffers():
        yield name, tuple(buffer.shape)
