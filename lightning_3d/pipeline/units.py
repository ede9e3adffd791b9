"""Units: the modules that a pipeline places, in the order in which they run.

A unit is placed undivided and has parameters, or statistics of its own: a block of a chain, an embedding, a norm, a
head. Modules around units (the LightningModule, containers of blocks) are *open*: their code runs on every stage.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lightning_3d.module.anatomy import Anatomy, Chain
from lightning_3d.module.torch_private import in_wrapper

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class Unit:
    """A module that is placed undivided on a stage."""

    name: str
    cost: float
    """Work per sample in units of one multiply-add per parameter; lookup tables count little."""


def find_units(module: nn.Module, anatomy: Anatomy, at_least: int) -> tuple[Unit, ...]:
    """Units of `module`; large ones are opened until there are `at_least` many, if possible."""
    # by identity: a module that stands at two places is open at both
    paths = [path for chain in anatomy.chains for path in accumulate(chain.name.split("."), "{}.{}".format)]
    opened = {id(module.get_submodule(path)) for path in paths}
    while True:
        units = tuple(_walk(module, "", opened))
        if len(units) >= at_least:
            return units
        closed = [unit for unit in units if _can_open(module.get_submodule(unit.name))]
        if not closed:
            return units
        opened.add(id(module.get_submodule(max(closed, key=lambda unit: unit.cost).name)))


def units_by_place(
    module: nn.Module, anatomy: Anatomy, chain: Chain, called: Mapping[str, bool]
) -> list[tuple[str, Unit]]:
    """The units before (`first`), in (`block`) and after (`last`) the blocks of `chain`, in running order.

    `called` has modules around the blocks, and True for those first called after a block. A unit that was not called
    stays behind the one before it. The list is empty where a block is several units.
    """
    found: dict[str, list[tuple[str, Unit]]] = {"first": [], "block": [], "last": []}
    place = "first"
    for unit in find_units(module, anatomy, len(chain.blocks)):
        late = [after for name, after in called.items() if f"{name}.".startswith(f"{unit.name}.")]
        if unit.name in chain.blocks:
            place = "block"
        elif late or place == "block":
            place = "last" if all(late) else "first"
        found[place].append((place, unit))
    return [pair for pairs in found.values() for pair in pairs] if len(found["block"]) == len(chain.blocks) else []


def in_running_order(units: tuple[Unit, ...], module: nn.Module, calls: Sequence[str]) -> tuple[Unit, ...]:
    """`units` in the order of their first calls; one that was not called stays behind the one before it.

    A module that stands at several places in the tree is called by its first name: its k-th name is its k-th call.
    """
    places: dict[int, list[int]] = {}
    for place, name in enumerate(calls):
        places.setdefault(id(module.get_submodule(name)), []).append(place)
    order: list[tuple[int, Unit]] = []
    for unit in units:
        mine = places.get(id(module.get_submodule(unit.name)), [])
        last = order[-1][0] if order else -1
        order.append((mine.pop(0) if len(mine) > 1 else mine[0] if mine else last, unit))
    return tuple(unit for _, unit in sorted(order, key=lambda pair: pair[0]))


def parameters_used_everywhere(module: nn.Module, units: tuple[Unit, ...]) -> tuple[str, ...]:
    """Names of the parameters of modules around units, whose code runs on every stage."""
    names = [unit.name for unit in units]
    found: list[str] = []
    for prefix, inner in module.named_modules():
        if any(prefix == name or prefix.startswith(name + ".") for name in names):
            continue
        dotted = f"{prefix}." if prefix else ""
        found += [dotted + name for name, _ in inner.named_parameters(recurse=False)]
    return tuple(dict.fromkeys(found))


def _walk(module: nn.Module, prefix: str, opened: set[int]) -> Iterator[Unit]:
    for name, child in module._modules.items():  # `named_children` leaves out one at a second place
        if child is None:
            continue
        full = f"{prefix}.{name}" if prefix else name
        if not any(parameter.numel() for parameter in child.parameters()) and not isinstance(child, _NormBase):
            continue
        if in_wrapper(child) is None and (id(child) in opened or type(child) in (nn.ModuleList, nn.ModuleDict)):
            yield from _walk(child, full, opened)
        else:
            yield Unit(full, _cost(child))


def _cost(module: nn.Module) -> float:
    tables = sum(
        inner.weight.numel() for inner in module.modules() if isinstance(inner, nn.Embedding | nn.EmbeddingBag)
    )
    return sum(parameter.numel() for parameter in module.parameters()) - 0.99 * tables


def _can_open(module: nn.Module) -> bool:
    """Torch's own modules use their children's parameters directly, so only containers among them are opened.

    What `torch.compile` wrapped stays whole: compiled code would repeat the decisions of hooks inside.
    """
    whole = "parametrizations" in module._modules or in_wrapper(module) is not None
    if whole or not any(True for _ in module.children()):
        return False
    return isinstance(module, _CONTAINERS) or not type(module).__module__.startswith("torch.nn.")
