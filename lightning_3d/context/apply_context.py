"""`apply_context`: let the blocks of a module compute on this rank's part of the sequence."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.axes.group import Group
from lightning_3d.axes.ledger import Ledger
from lightning_3d.context.cut_attention import replace_attention
from lightning_3d.context.cut_block import patch_block
from lightning_3d.context.cut_plan import ContextPlan
from lightning_3d.layout import CONTEXT_AXIS
from lightning_3d.module.undo import UndoStack
from lightning_3d.tensor.axis import Axis


def apply_context(
    module: nn.Module, plan: ContextPlan, mesh: DeviceMesh, undo: UndoStack, ledger: Ledger | None = None
) -> None:
    """Put the layers on the blocks of `module` that are on this stage. Gradients are averaged over context ranks then.

    Args:
        module: with equal weights on every context rank.
        plan: from `plan_context` with the size of `mesh`.
        mesh: the one-dimensional context mesh.
        undo: takes the way back.
        ledger: counts the bytes of every collective.
    """
    axis = Axis(Group(mesh.get_group(), CONTEXT_AXIS, ledger), weight=plan.size)
    here = {name: module.get_submodule(name) for name in plan.blocks}
    here = {name: block for name, block in here.items() if not any(p.is_meta for p in block.parameters())}
    replace_attention(here.values(), undo)
    for name, block in here.items():
        patch_block(block, plan.blocks[name], axis, undo)
