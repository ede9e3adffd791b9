"""Parts of a block that are called by themselves: a plan is proven for the block as a whole and holds for nothing less.

`nn.Sequential` is such a block where its layers are called one by one, to take what leaves each. What is seen of this
in the recorded run keeps the block whole; what comes later is refused, since the part would compute with shards alone.
"""

from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch import nn

from lightning_3d.errors import TensorPlanError
from lightning_3d.module.autograd_private import in_backward
from lightning_3d.tensor.edges import Memo
from lightning_3d.tensor.forwards import UnitForward
from lightning_3d.tensor.patch import Undo
from lightning_3d.tensor.tensor_plan import TensorPlan, UnitPlan
from lightning_3d.tensor.written_plan import around


class ShardsCalled:
    """Notes of which blocks a part is called while the block itself is not."""

    def __init__(self, module: nn.Module, units: list[str]) -> None:
        self.found: set[str] = set()
        self.handles: list[Any] = []
        self._open: list[str] = []
        homes: dict[nn.Module, list[str]] = {}
        for name in units:
            unit = module.get_submodule(name)
            self.handles.append(unit.register_forward_pre_hook(lambda *_, name=name: self._open.append(name)))
            self.handles.append(unit.register_forward_hook(self._close, always_call=True))
            for part in unit.modules():
                if part is not unit and part._parameters:
                    homes.setdefault(part, []).append(name)
        for part, names in homes.items():
            self.handles.append(part.register_forward_pre_hook(lambda *_, names=names: self._called(names)))

    def _close(self, *_: Any) -> None:
        self._open.pop()

    def _called(self, names: list[str]) -> None:
        if not set(names).intersection(self._open):
            self.found.update(names)


def guard_shards(module: nn.Module, plan: TensorPlan, undo: Undo) -> None:
    """From now on a divided part of a block raises when it is called outside of the block."""
    guards: dict[nn.Module, _Guard] = {}
    for name, unit_plan in plan.units.items():
        unit = module.get_submodule(name)
        forward = unit.__dict__.get("forward")
        if isinstance(forward, UnitForward):  # else it is on another stage
            for part in _divided_parts(unit_plan):
                guard = guards.setdefault(unit.get_submodule(part), _Guard(f"{name}.{part}" if name else part, name))
                guard.memos.append(forward.memo)
    for part_module, guard in guards.items():
        undo.steps.append(part_module.register_forward_pre_hook(guard).remove)


def _divided_parts(plan: UnitPlan) -> Iterator[str]:
    """Modules inside the block that compute otherwise than they would alone, and those around them."""
    edges = chain(plan.copies, plan.emits, plan.mixes, plan.reduces, plan.decoys)
    attributes = (name for name, _ in plan.attributes)
    owners = (name.rpartition(".")[0] for name in chain(plan.splits, plan.slices, plan.summed, plan.shared))
    return iter(dict.fromkeys(part for name in chain(edges, attributes, owners) for part in around(name)))


class _Guard:
    """A hook before the forward of one part. An object: a copied module gets one that watches the copy."""

    def __init__(self, name: str, unit: str) -> None:
        self.name, self.unit = name, unit
        self.memos: list[Memo] = []

    def __call__(self, *_: Any) -> None:
        if any(memo.running for memo in self.memos):
            return
        unit = self.unit or "the whole module"
        if in_backward():  # a checkpoint that is not torch's repeats a part of what the block did
            if all(memo.repeatable for memo in self.memos):
                return
            raise TensorPlanError(
                f"Backward computes {self.name} again, and not through torch.utils.checkpoint.checkpoint: whether"
                f" {unit} was whole, its dropout and how its sequence was divided are not known there. Use that"
                f' function, or keep the block whole: tensor_plan={{"{self.unit or self.name}": "whole"}}.'
            )
        raise TensorPlanError(
            f"{self.name} is called by itself, and is divided over the tensor ranks as a part of {unit}, which was"
            f" called as a whole when it was planned. Call {unit}, or keep it whole:"
            f' tensor_plan={{"{self.unit or self.name}": "whole"}}.'
        )
