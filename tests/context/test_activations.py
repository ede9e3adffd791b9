"""What a divided block keeps for its backward, counted by autograd's own hooks."""

import pytest
import torch

from lightning_3d.activations.recomputed_block import SavedBytes
from lightning_3d.context.cut_attention import attention
from lightning_3d.context.cut_block import patch_block
from lightning_3d.module.undo import UndoStack
from lightning_3d.sandbox.silence import SDPA
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.late_tensor import compute_late
from lightning_3d.tensor.simulate import run_shards
from tests.context import trained
from tests.context.test_plans import plan


def kept(block, x):
    with SavedBytes(block.parameters()) as saved:
        result = block(x)
    compute_late(result)
    return saved.peak


@pytest.mark.parametrize(("kind", "ranks"), [("plain", 2), ("plain", 4), ("retention", 2)])
def test_a_rank_keeps_its_part(kind, ranks):
    """The result of attention is kept twice: as heads, and as positions."""
    (cut, *_) = plan(lambda: trained.nano(kind), ranks).blocks.values()
    block = trained.Block(kind, 4, 0.0).train()
    x = torch.randn(2, 64, trained.WIDTH, requires_grad=True)
    whole = kept(block, x)

    def on_part(axis):
        twin = trained.Block(kind, 4, 0.0).train()
        with UndoStack() as undo:
            patch_block(twin, cut, Axis(axis.group, weight=ranks), undo)
            return kept(twin, x)

    with UndoStack() as undo:
        undo.replace(SDPA, attention, [block])
        for part in run_shards(ranks, on_part):
            assert part == pytest.approx(whole / ranks, rel=0.1), (part, whole)
