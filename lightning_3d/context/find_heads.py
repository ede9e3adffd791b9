"""`with_heads`: the division of a block that mixes positions by other means than attention.

Linear attention, state spaces and products with a mask mix positions within a head or a channel. The module that does
gets all positions and computes a share of its heads from slices of its weights, as tensor ranks do. A plan for tensor
ranks tells the slices. Everything else in the block is on a part of the sequence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor, nn

from lightning_3d.context.cut_plan import ENOUGH, BlockCut
from lightning_3d.tensor.plan_module import plan_unit
from lightning_3d.tensor.sample import Sample
from lightning_3d.tensor.sequence import sequence_candidates
from lightning_3d.tensor.tensor_plan import SequencePlan, UnitPlan


def with_heads(block: nn.Module, call: Sample, results: Sequence[Tensor], size: int) -> Iterator[BlockCut]:
    """Cuts that may be right: each module alone that a plan for tensor ranks divides, then all of them."""
    plan, _ = plan_unit(block, [call], size, {}, {}, False, False)
    if plan is None:
        return
    inputs = [tensor.shape for tensor in call.tensors()]
    for whole in sequence_candidates(plan, call.tensors(), results, [], size):
        found = whole.sequence
        assert found is not None
        if inputs[found.stream][found.dim] < ENOUGH * size:
            continue  # the dimension of rows
        rows = 1 if inputs[found.stream][1 - found.dim] == 1 else None
        cut = BlockCut(stream=found.stream, dim=found.dim, results=dict.fromkeys(found.results, found.dim), rows=rows)
        for name in found.entries:
            part = replace(plan.renamed(name, name), inputs=plan.inputs, folded=plan.folded)
            yield replace(cut, heads=_of_whole(part, replace(found, entries=(name,))))
        yield replace(cut, heads=_of_whole(plan, found))


def _of_whole(plan: UnitPlan, sequence: SequencePlan) -> UnitPlan:
    """`plan` for ranks that have whole weights. The cut has the random calls, and the form of proven calls."""
    slices = {**plan.slices, **plan.splits}
    return replace(plan, splits={}, slices=slices, dropouts=(), dropout_modules=(), forms=(), sequence=sequence)
