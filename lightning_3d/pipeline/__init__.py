"""Pipeline parallelism for an unchanged `training_step`.

How a strategy uses it, in order::

    per_rank = stages_per_rank(schedule, asked)            # 2 for the V-shaped schedules
    placement = stage_ranks(schedule, group.size(), per_rank)
    split = plan_split(module, num_stages=len(placement), cuts=pipeline_split)     # on the uncut module
    mine = [stage for stage, rank in enumerate(placement) if rank == group.rank()]
    applied = apply_split(module, split, mine)             # other stages' blocks to meta
    move_present(module, device)                           # not module.to: absent parameters cannot be moved
    ...                                                    # tensor layers, recompute, ZeRO, optimizers
    check_supported(module, optimizers)
    pipeline = Pipeline(module, split, group)
    pipeline.open(Hooks(...), undo)                        # last: its hooks must be outermost

    output = pipeline.training_step(batch, batch_idx, last=..., scale=1 / accumulate)      # adds to the gradients
    output = pipeline.eval_step("validation_step", batch, batch_idx)

    undo.close()                                           # at teardown
    applied.undo(group, placement)                         # not after an error: it receives from the others

All ranks of a pipeline must have the same batch, the same default random seed, and call these in the same order.

What differs from one process, by nature: `training_step` runs once per microbatch and stage, so other effects than
computing, logging and updating metrics happen that often; batch norm normalizes over a microbatch; dropout draws
other masks (the same ones for any number of stages). With one block to place nothing is cut, and the step runs as ever.
"""

from lightning_3d.pipeline.context import Hooks as Hooks
from lightning_3d.pipeline.limits import check_supported as check_supported
from lightning_3d.pipeline.pipeline import Pipeline as Pipeline
from lightning_3d.pipeline.schedule import stage_ranks as stage_ranks
from lightning_3d.pipeline.schedule import stages_per_rank as stages_per_rank
from lightning_3d.pipeline.split import AppliedSplit as AppliedSplit
from lightning_3d.pipeline.split import PipelineSplit as PipelineSplit
from lightning_3d.pipeline.split import Tie as Tie
from lightning_3d.pipeline.split import apply_split as apply_split
from lightning_3d.pipeline.split import move_present as move_present
from lightning_3d.pipeline.split import plan_split as plan_split

__all__ = [
    "AppliedSplit",
    "Hooks",
    "Pipeline",
    "PipelineSplit",
    "Tie",
    "apply_split",
    "check_supported",
    "move_present",
    "plan_split",
    "stage_ranks",
    "stages_per_rank",
]
