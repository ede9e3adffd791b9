"""What a rank holds of a module, counted from its own parameters, before anything is placed."""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from lightning_3d.layout import Layout
from lightning_3d.pipeline.schedule import stage_ranks
from lightning_3d.pipeline.split import PipelineSplit
from lightning_3d.planner.memory import offloaded
from lightning_3d.planner.states import StateBytes, sharded_states
from lightning_3d.tensor.plan import TensorPlan


def held_on_stages(
    module: nn.Module, stages: frozenset[int], split: PipelineSplit | None, tensor: TensorPlan | None
) -> dict[nn.Parameter, int]:
    """Elements that the first tensor rank holds of each parameter that is on one of `stages`."""
    held: dict[nn.Parameter, int] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        holding = _holding(name, split)
        if holding is None or stages & set(holding):
            divided = tensor.splits.get(name) if tensor else None
            size = parameter.numel()
            held[parameter] = size if divided is None else size // divided.size * divided.local_size(0)
    return held


def parameters_on(module: nn.Module, stage: int, split: PipelineSplit | None, tensor: TensorPlan | None) -> int:
    """Parameters that the first tensor rank of a stage holds; those that several stages hold count on each."""
    return sum(held_on_stages(module, frozenset([stage]), split, tensor).values())


def stages_of(layout: Layout, split: PipelineSplit | None, pipeline_rank: int) -> frozenset[int]:
    """The stages on a pipeline rank."""
    if split is None:
        return frozenset([0])
    size = layout.pipeline_parallel_size
    ranks = stage_ranks(layout.schedule, size, split.num_stages // size)
    return frozenset(stage for stage, rank in enumerate(ranks) if rank == pipeline_rank)


def expected_states(
    module: nn.Module, layout: Layout, split: PipelineSplit | None, tensor: TensorPlan | None
) -> list[StateBytes]:
    """Bytes of weights, gradients and one optimizer state (`with_states` makes it those of an optimizer), as the ZeRO
    table has them, on a rank of each pipeline rank.

    Under a pipeline, weights are gathered and gradients reduced once per step, so that stages 2 and 3 hold as much as
    stage 1 there.
    """
    stage = 3 if layout.offload == "all" else layout.zero_stage
    stage = min(layout.zero_stage, 1) if layout.pipeline_parallel_size > 1 else stage
    ranks = layout.zero_shard_size or layout.data_parallel_size
    expected = []
    for pipeline_rank in range(layout.pipeline_parallel_size):
        held = held_on_stages(module, stages_of(layout, split, pipeline_rank), split, tensor)
        weights = sum(size * parameter.element_size() for parameter, size in held.items())
        trained = sum(size * parameter.element_size() for parameter, size in held.items() if parameter.requires_grad)
        whole = StateBytes(weights=weights, gradients=trained, optimizer=trained)
        expected.append(offloaded(sharded_states(whole, 1, stage=stage, ranks=ranks), layout)[0])
    return expected


def with_states(expected: Sequence[StateBytes], moments: float) -> list[StateBytes]:
    """`expected` with `moments` states of a parameter's size: Adam keeps 2, SGD without momentum none."""
    return [replace(each, optimizer=moments * each.optimizer) for each in expected]


def _holding(name: str, split: PipelineSplit | None) -> tuple[int, ...] | None:
    """Stages that hold a parameter, None for all."""
    if split is None or name in split.everywhere:
        return None
    for unit, stages in split.holders.items():
        if name == unit or name.startswith(f"{unit}."):
            return stages
    return None
