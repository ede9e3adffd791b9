"""Bytes of weights, gradients and optimizer states on each rank, counted from the module before it is divided."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import nn

from lightning_3d.experts.expert_plan import ExpertPlan
from lightning_3d.layout import PIPELINE_AXIS, Layout
from lightning_3d.module.packed_weights import is_special, is_whole, scales, value_bytes
from lightning_3d.optim.state_bytes import StateBytes, offloaded
from lightning_3d.pipeline.split import PipelineSplit
from lightning_3d.ranks.mesh import expert_replicas
from lightning_3d.tensor.tensor_plan import TensorPlan

Dividing = TensorPlan | ExpertPlan | None
"""A plan by which ranks have parts of parameters."""


def elements_on_stages(
    module: nn.Module, stages: Sequence[int], split: PipelineSplit | None, *plans: Dividing
) -> dict[nn.Parameter, int]:
    """Elements on the first tensor rank and owner of experts, of each parameter that is on one of `stages`."""
    elements: dict[nn.Parameter, int] = {}
    splits = {name: cut for plan in plans if plan is not None for name, cut in plan.splits.items()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if split is None or not set(stages).isdisjoint(split.stages_of(name)):
            cut = splits.get(name)
            size = parameter.numel()
            elements[parameter] = size if cut is None else size // cut.size * cut.local_size(0)
    return elements


def parameters_on(module: nn.Module, stage: int, split: PipelineSplit | None, *plans: Dividing) -> int:
    """Number of parameters on the first rank of a stage. Parameters of several stages count on each."""
    return sum(elements_on_stages(module, [stage], split, *plans).values())


def expected_states(
    module: nn.Module,
    layout: Layout,
    split: PipelineSplit | None,
    tensor: TensorPlan | None,
    experts: ExpertPlan | None = None,
    *,
    halves: Collection[nn.Parameter] = (),
    microbatches: int = 1,
) -> list[StateBytes]:
    """Bytes of weights, gradients and one optimizer state on a rank of each pipeline rank, in a step.

    `with_states` turns one optimizer state into those of an optimizer. Below stage 3, and under a pipeline, gathered
    weights are there besides the shards; those of `halves` have 2 bytes. Gradients are full where a rank adds up
    those of several microbatches.
    """
    shared = {
        module.get_parameter(f"{name}.{own}"): 1 if each.copied else expert_replicas(layout)
        for name, each in (experts.modules.items() if experts is not None else ())
        for own in each.parameters
    }
    """Ranks that have shards of an expert: those of a list, or gathered, are copied."""
    shared |= {parameter: 1 for parameter in module.parameters() if is_whole(parameter) or is_special(parameter)}
    unpacking = sum(tensor.nbytes for tensor in scales(module))
    expected, whole_gradients = [], layout.accumulates(microbatches)
    for pipeline_rank in range(layout.sizes[PIPELINE_AXIS]):
        own = split.stages_on(pipeline_rank, layout.sizes[PIPELINE_AXIS], layout.schedule) if split else (0,)
        weights, gradients, optimizer = float(unpacking), 0.0, 0.0
        for parameter, size in elements_on_stages(module, own, split, tensor, experts).items():
            bytes_of = size * value_bytes(parameter) / max(1, parameter.numel())
            trained = bytes_of * parameter.requires_grad
            shards = shared.get(parameter, layout.shards) if layout.zero_stage else 1
            weights += bytes_of / shards
            if shards > 1 and not layout.streams_weights:
                weights += 2 * size if parameter in halves else bytes_of
            gradients += trained if whole_gradients else trained / shards
            optimizer += trained / shards
        states = StateBytes(weights=weights, gradients=gradients, optimizer=optimizer)
        expected.append(offloaded(states, layout)[0])
    return expected


def with_states(expected: Sequence[StateBytes], states: float) -> list[StateBytes]:
    """`expected` with `states` states of a parameter's size: Adam has 2, SGD without momentum none."""
    return [replace(each, optimizer=states * each.optimizer) for each in expected]
