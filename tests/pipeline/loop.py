"""A pipeline that is driven without a Trainer."""

from typing import Any

import torch.distributed as dist

from lightning_3d.layout import stage_ranks
from lightning_3d.module.undo import UndoStack
from lightning_3d.pipeline.cut_module import StepCallbacks
from lightning_3d.pipeline.pipeline import Pipeline
from lightning_3d.pipeline.schedule import stages_per_rank
from lightning_3d.pipeline.split import PipelineSplit, apply_split, plan_split


def opened(module: Any, split: PipelineSplit, group: dist.ProcessGroup, undo: UndoStack, **options: Any) -> Pipeline:
    """A pipeline that runs steps of `module` until `undo` closes."""
    pipeline = Pipeline(module, split, group, **options)
    pipeline.open(StepCallbacks(), undo)
    return pipeline


def cut(module: Any, schedule: str = "1f1b", per_rank: int = 1, **options: Any) -> Pipeline:
    """A pipeline of all ranks over `module`, whose stages of other ranks are absent here from now on."""
    group, per_rank = dist.group.WORLD, stages_per_rank(schedule, per_rank)
    split = plan_split(module, None, group.size() * per_rank)
    placement = stage_ranks(schedule, group.size(), per_rank)
    apply_split(module, split, [stage for stage, rank in enumerate(placement) if rank == group.rank()])
    module.log = lambda *args, **kwargs: None
    return opened(module, split, group, UndoStack(), schedule=schedule, **options)
