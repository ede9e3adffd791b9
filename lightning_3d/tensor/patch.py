"""Make one block compute in shards: its modules keep their own forward and find local parameters and attributes.

During a module's forward the parameters it uses are shadowed by local tensors in its `__dict__`, which attribute
access looks at before `_parameters`. So nothing is captured: FSDP2 may exchange the parameters between calls.
"""

import copy as copies_of
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_3d.tensor.attention import use_open_attention
from lightning_3d.tensor.autograd_collectives import copy, local_shard, share
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.edges import Memo
from lightning_3d.tensor.fallback import Change
from lightning_3d.tensor.forwards import ShardedForward, UnitForward
from lightning_3d.tensor.geometry import TensorSplit, local_part
from lightning_3d.tensor.tensor_plan import UnitPlan


@dataclass
class Undo:
    """What to put back, last change first."""

    steps: list[Callable[[], None]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    """Those of the steps that are attributes."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an instance attribute, past `nn.Module.__setattr__`, and remember what was there."""
        self.changes.append(Change(owner, name, value))
        self.steps.append(self.changes[-1].revert)

    def run(self) -> None:
        while self.steps:
            self.steps.pop()()


def patch_unit(unit: nn.Module, plan: UnitPlan, axis: Axis) -> Undo:
    """Patch `unit`, whose split parameters are already local (or DTensors), to compute by `plan`."""
    undo, memo = Undo(), Memo(axis)
    use_open_attention(unit, undo.set)
    for (name, path), values in plan.attributes.items():
        _set_attribute(undo, unit.get_submodule(name), path, values[axis.rank])
    entries = plan.sequence.entries if plan.sequence is not None else ()
    forwards = {name: ShardedForward(unit.get_submodule(name), axis, memo) for name in plan.patched}
    for name, forward in forwards.items():
        forward.enters, forward.emits, forward.leaves = (
            name in found for found in (plan.copies, plan.emits, plan.reduces)
        )
        forward.gathers, forward.mixes = name in entries, plan.mixes.get(name)
        forward.width = plan.decoys[name][axis.rank] if name in plan.decoys else None
    for parameter, holder in plan.holders:
        owner_name, _, own_name = parameter.rpartition(".")
        shadow = _Shadow(axis, parameter in plan.shared, plan.slices.get(parameter), parameter in plan.summed)
        forwards[holder].shadows.append((unit.get_submodule(owner_name), own_name, shadow))
    for forward in forwards.values():
        undo.set(forward.module, "forward", forward)
        if isinstance(forward.module, nn.MultiheadAttention):
            undo.set(forward.module, "_sum_over_ranks", forward._sum)
    undo.set(unit, "forward", UnitForward(unit, plan, axis, memo, undo.changes))
    return undo


@dataclass
class _Shadow:
    """The local tensor that stands for a parameter during a forward."""

    axis: Axis
    shared: bool
    slice: TensorSplit | None
    summed: bool

    def __call__(self, parameter: Tensor) -> Tensor:
        if self.shared:
            return share(parameter, self.axis)
        if self.slice is not None:
            return local_part(copy(parameter, self.axis), self.slice, self.axis.rank)
        return copy(parameter, self.axis) if self.summed else local_shard(parameter)


def get_attribute(module: nn.Module, path: str) -> Any:
    """An attribute of a module or of an object it holds."""
    value: Any = module
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _set_attribute(undo: Undo, module: nn.Module, path: str, value: Any) -> None:
    first, _, rest = path.partition(".")
    if rest:
        # Objects such as a configuration are shared by many modules: this one gets its own.
        value, changed = copies_of.copy(getattr(module, first)), value
        setattr(value, rest, changed)
    undo.set(module, first, value)


def local_value(plan: UnitPlan, name: str, value: Tensor, rank: int) -> Tensor:
    """What `rank` holds of a parameter."""
    split = plan.splits.get(name)
    return value if split is None else local_part(value, split, rank)
