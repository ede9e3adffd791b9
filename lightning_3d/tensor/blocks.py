"""Blocks of a module: the units that are planned one at a time, and experts that no token of the proof went to."""

from collections.abc import Iterator

from torch import nn

from lightning_3d.module.torch_private import own_parameters
from lightning_3d.tensor.tensor_plan import UnitPlan

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_blocks(module: nn.Module) -> list[str]:
    """Names of the blocks, or of the smallest modules with two matrix products, in order.

    A module inside a block is not listed again, and a block with two names is listed under the first.
    """
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
    """Number of parameters that could be the matrix of a product."""
    return sum(
        parameter.dim() > 1
        for owner in module.modules()
        if not isinstance(owner, nn.Embedding)
        for parameter in own_parameters(owner).values()
        if parameter is not None
    )


def structure(module: nn.Module) -> tuple[object, ...]:
    """A key that is equal for modules of one kind: same classes, parameters and buffers of the same shapes."""
    return tuple(_describe(module))


def _describe(module: nn.Module) -> Iterator[object]:
    first: dict[int, str] = {}
    for name, child in module.named_modules():
        yield name, type(child)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield name, tuple(parameter.shape), first.setdefault(id(parameter), name)
    for name, buffer in module.named_buffers():
        yield name, tuple(buffer.shape)


def plan_idle_experts(plan: UnitPlan, block: nn.Module, called: set[str]) -> UnitPlan:
    """`plan` with the experts of `block` that did not run planned like a proven one of their kind.

    Tokens decide which of many experts run, and a proof runs on few. Modules in one list with the same structure are
    the same code, as blocks of one kind are.
    """
    for proven, idle in _idle_experts(plan, block, called):
        plan = plan.merged(plan.renamed(proven, idle))
    return plan


def _idle_experts(plan: UnitPlan, block: nn.Module, called: set[str]) -> Iterator[tuple[str, str]]:
    """Pairs (proven child, child like it that did not run) of every list of modules."""
    for prefix, holder in block.named_modules():
        if not isinstance(holder, nn.ModuleList | nn.ModuleDict):
            continue
        names = {f"{prefix}.{name}" if prefix else name: child for name, child in holder.named_children()}
        for name, child in names.items():
            if name in plan.owners or any(ran == name or ran.startswith(f"{name}.") for ran in called):
                continue
            planned = (n for n in names if any(p.startswith(f"{n}.") for p in plan.splits))
            proven = next((n for n in planned if structure(names[n]) == structure(child)), None)
            if proven is not None:
                yield proven, name
