"""Patches of one block: its modules keep their own forward and find local parameters and attributes.

During a module's forward, local tensors in its `__dict__` shadow the parameters that it uses: attribute access reads
`__dict__` before `_parameters`. So nothing is captured, and FSDP2 may exchange the parameters between calls.
"""

import copy as copies_of
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from lightning_3d.module.anatomy import place_of
from lightning_3d.module.forward import add_layer
from lightning_3d.module.undo import UndoStack
from lightning_3d.tensor.attention import use_open_attention
from lightning_3d.tensor.autograd_collectives import copy, gather, local_shard, share
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.block_forward import BlockForward
from lightning_3d.tensor.geometry import TensorSplit, local_part
from lightning_3d.tensor.module_forward import BlockState, ModuleForward, OwnRoutes
from lightning_3d.tensor.recompute import save_states
from lightning_3d.tensor.tensor_plan import UnitPlan


def patch_unit(unit: nn.Module, plan: UnitPlan, axis: Axis, undo: UndoStack, name: str = "") -> BlockForward:
    """Patch `unit`, whose split parameters are already local (or DTensors), to compute by `plan`."""
    undo.callback(save_states())
    state = BlockState(axis)
    changes = use_open_attention(unit, undo, state)

    def put(owner: nn.Module, attribute: str, value: Any) -> None:
        changes.append(undo.set(owner, attribute, value))

    for (owner, path), values in plan.attributes.items():
        _set_attribute(put, unit.get_submodule(owner), path, values[axis.rank])
    entries = plan.sequence.entries if plan.sequence is not None else ()
    inside = dict.fromkeys((*plan.patched, *(owner for owner, _ in plan.attributes if owner)))
    forwards = {at: ModuleForward(unit.get_submodule(at), state, f"{name}.{at}" if name else at, name) for at in inside}
    for at, forward in forwards.items():
        forward.enters, forward.emits, forward.reduces = (
            at in found for found in (plan.copies, plan.emits, plan.reduces)
        )
        forward.gathers, forward.mixes = at in entries, plan.mixes.get(at)
        forward.width = plan.decoys[at][axis.rank] if at in plan.decoys else None
        forward.routes = OwnRoutes(forward.module, plan.routes[at], axis.group) if at in plan.routes else None
        forward.foreign = plan.owners.get(at, axis.rank) != axis.rank
    for parameter, holder in plan.holders:
        facts = plan.slices.get(parameter), parameter in plan.summed, plan.splits.get(parameter)
        shadow = _Shadow(axis, parameter in plan.shared, *facts)
        forwards[holder].shadows.append((*place_of(unit, parameter), shadow))
    for forward in forwards.values():
        add_layer(forward, undo)
        if isinstance(forward.module, nn.MultiheadAttention):
            put(forward.module, "_sum_over_ranks", forward.sum_over_ranks)
    frozen = [name for name in plan.splits if not unit.get_parameter(name).requires_grad]
    block = BlockForward(unit, plan, state, changes, frozen)
    add_layer(block, undo)
    return block


@dataclass
class _Shadow:
    """Makes the local tensor that stands for a parameter during a forward."""

    axis: Axis
    shared: bool
    slice: TensorSplit | None
    summed: bool
    split: TensorSplit | None

    def full(self, parameter: Tensor) -> Tensor:
        return parameter if self.split is None else gather(local_shard(parameter), self.axis, self.split)

    def __call__(self, parameter: Tensor) -> Tensor:
        averaged = self.axis.weight > 1  # ranks then have whole parameters, whose gradients are summed elsewhere
        if self.shared:
            return parameter / self.axis.size if averaged else share(parameter, self.axis)
        if self.slice is None and not self.summed:
            return local_shard(parameter)
        used = parameter if averaged else copy(parameter, self.axis)
        return used if self.slice is None else local_part(used, self.slice, self.axis.rank)


def get_attribute(module: nn.Module, path: str) -> Any:
    """An attribute of a module or of an object in its attributes."""
    value: Any = module
    for step in path.split("."):
        value = getattr(value, step)
    return value


def _set_attribute(put: Callable[[nn.Module, str, Any], None], module: nn.Module, path: str, value: Any) -> None:
    first, _, rest = path.partition(".")
    if rest:
        # Many modules may share an object such as a configuration: this module gets a copy.
        value, changed = copies_of.copy(getattr(module, first)), value
        setattr(value, rest, changed)
    put(module, first, value)


def local_value(plan: UnitPlan, name: str, value: Tensor, rank: int) -> Tensor:
    """The shard of a parameter that `rank` has: all of it where it is not split."""
    split = plan.splits.get(name)
    return value if split is None else local_part(value, split, rank)
