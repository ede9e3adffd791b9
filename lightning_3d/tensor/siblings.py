"""Experts that no token of the proof went to: they are planned like one of their kind that was proven.

Which of many experts run depends on the tokens, and a proof runs on few. Modules in one list, of the same classes with
parameters of the same shapes, are the same code, as blocks of one kind are.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TypeVar

from torch import nn

from lightning_3d.tensor.blocks import structure
from lightning_3d.tensor.tensor_plan import UnitPlan

V = TypeVar("V")


def with_siblings(plan: UnitPlan, block: nn.Module, called: set[str]) -> UnitPlan:
    """`plan` with what it says of a module said of its siblings in `block` too that did not run."""
    for twin, missing in _siblings(plan, block, called):
        plan = _also(plan, lambda name, twin=twin, missing=missing: _renamed(name, twin, missing))  # type: ignore[misc]
    return plan


def _siblings(plan: UnitPlan, block: nn.Module, called: set[str]) -> Iterator[tuple[str, str]]:
    """(a child that is planned, one like it that did not run) for every list of modules."""
    for prefix, holder in block.named_modules():
        if not isinstance(holder, nn.ModuleList | nn.ModuleDict):
            continue
        names = {f"{prefix}.{name}" if prefix else name: child for name, child in holder.named_children()}
        for name, child in names.items():
            if any(ran == name or ran.startswith(f"{name}.") for ran in called):
                continue
            like = (n for n in names if any(p.startswith(f"{n}.") for p in plan.splits))
            twin = next((n for n in like if structure(names[n]) == structure(child)), None)
            if twin is not None:
                yield twin, name


def _renamed(name: str, twin: str, missing: str) -> str | None:
    if name == twin or name.startswith(f"{twin}."):
        return missing + name.removeprefix(twin)
    return None


def _also(plan: UnitPlan, rename: Callable[[str], str | None]) -> UnitPlan:
    def names(found: tuple[str, ...]) -> tuple[str, ...]:
        return (*found, *(new for name in found if (new := rename(name)) is not None))

    def keys(found: Mapping[str, V]) -> dict[str, V]:
        return {**found, **{new: value for name, value in found.items() if (new := rename(name)) is not None}}

    read = {(new, path): value for (name, path), value in plan.attributes.items() if (new := rename(name)) is not None}
    held = [(new, rename(at) or at) for name, at in plan.holders if (new := rename(name)) is not None]
    return replace(
        plan,
        splits=keys(plan.splits),
        slices=keys(plan.slices),
        summed=names(plan.summed),
        shared=names(plan.shared),
        copies=names(plan.copies),
        emits=names(plan.emits),
        mixes=keys(plan.mixes),
        reduces=names(plan.reduces),
        holders=(*plan.holders, *held),
        attributes={**plan.attributes, **read},
        decoys=keys(plan.decoys),
    )
