"""Cuts a module into the stages of a pipeline, and compares them with the uncut module."""

import torch
from torch import distributed as dist
from torch import nn

from lightning_3d.errors import NO_PIPELINE, ConfigurationError, DivergenceError, Lightning3DError, PipelineSplitError
from lightning_3d.layout import Layout, stage_ranks
from lightning_3d.module.undo import UndoStack
from lightning_3d.pipeline.context import StepCallbacks
from lightning_3d.pipeline.exchange import StageExchange
from lightning_3d.pipeline.observe import UncutRun
from lightning_3d.pipeline.pipeline import Pipeline
from lightning_3d.pipeline.split import PipelineSplit, apply_split
from lightning_3d.ranks import agreement


def apply_stages(
    module: nn.Module,
    split: PipelineSplit,
    layout: Layout,
    group: dist.ProcessGroup,
    device: torch.device,
    undo: UndoStack,
) -> StageExchange:
    """Keep the stages of this rank. Parameters of other stages are replaced by meta tensors."""
    ranks = stage_ranks(layout.schedule, group.size(), split.num_stages // group.size())
    mine = split.stages_on(group.rank(), group.size(), layout.schedule)
    undo.collective(apply_split(module, split, mine).undo, group, ranks)
    return StageExchange(split, group, ranks, device)


def prove_stages(pipeline: Pipeline, uncut_run: UncutRun, hooks: StepCallbacks) -> None:
    """Compare one microbatch with what the uncut module computed. Collective; raises on every rank."""
    with UndoStack() as undo:
        pipeline.open(hooks, undo)
        agreement.together(lambda: _prove(pipeline, uncut_run))


def _prove(pipeline: Pipeline, uncut_run: UncutRun) -> None:
    try:
        pipeline.prove(uncut_run)
    except (ConfigurationError, DivergenceError):
        raise
    except Exception as error:
        agreement.raise_if_alone(error)
        known = isinstance(error, Lightning3DError) and error.rank is not None
        name = error if known else f"{type(error).__name__}: {error}"
        if _differentiates(error):
            raise PipelineSplitError(
                f"{uncut_run.step} takes derivatives by itself (torch.autograd.grad: forces, a gradient penalty, a"
                " physics loss, an adversarial input). They go through blocks of other stages, and no rank of a"
                f" pipeline has the whole graph ({name}). Use {NO_PIPELINE}: data"
                " parallelism with any zero_stage and tensor parallelism train it."
            ) from error
        raise PipelineSplitError(
            f"Cut into stages, the step fails, but uncut it does not ({name}). Does its code"
            " read from a block of another stage what only the rank of that stage has (a tensor kept on a module)?"
            " Pass it from block to block, or keep both on one stage with pipeline_split."
        ) from error


def _differentiates(error: Exception) -> bool:
    """True for torch's errors about `autograd.grad`: while stages are compared nothing else calls it."""
    return any(text in str(error) for text in ("differentiated Tensor", "does not require grad"))
