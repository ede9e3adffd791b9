"""Pipeline parallelism for an unchanged `training_step`. `parallelize.parallelize` calls it.

All ranks of a pipeline must have the same batch and the same default random seed, and call the same methods in order.

The differences to one process:

- `training_step` runs once per microbatch and stage. Its effects happen that often, except for computing, logging and
  metrics.
- Batch norm normalizes over a microbatch.
- Dropout draws other masks: the same ones for any number of stages.

With one block there is nothing to cut, and the step runs as on one device.
"""

from lightning_3d.pipeline.context import StepCallbacks as StepCallbacks
from lightning_3d.pipeline.pipeline import Pipeline as Pipeline
from lightning_3d.pipeline.schedule import stages_per_rank as stages_per_rank
from lightning_3d.pipeline.split import AppliedSplit as AppliedSplit
from lightning_3d.pipeline.split import PipelineSplit as PipelineSplit
from lightning_3d.pipeline.split import Tie as Tie
from lightning_3d.pipeline.split import apply_split as apply_split
from lightning_3d.pipeline.split import plan_split as plan_split
from lightning_3d.pipeline.unsupported import check_supported as check_supported

__all__ = [
    "AppliedSplit",
    "Pipeline",
    "PipelineSplit",
    "StepCallbacks",
    "Tie",
    "apply_split",
    "check_supported",
    "plan_split",
    "stages_per_rank",
]
