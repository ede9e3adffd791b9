"""Bytes of weights, gradients and optimizer states on each rank, counted from the module before it is divided."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from lightning_3d.experts.expert_plan import ExpertPlan
from lightning_3d.layout import PIPELINE_AXIS, Layout
from lightning_3d.module.packed_weights import is_whole, scales
from lightning_3d.optim.states import StateBytes, offloaded, sharded_states
from lightning_3d.pipeline.split import PipelineSplit
from lightning_3d.ranks.mesh import expert_replicas
from lightning_3d.tensor.tensor_plan import TensorPlan


def elements_on_stages(
    module: nn.Module,
    stages: Sequence[int],
    split: PipelineSplit | None,
    tensor: TensorPlan | None,
    experts: ExpertPlan | None = None,
) -> dict[nn.Parameter, int]:
    """Elements on the first tensor rank and owner of experts, of each parameter that is on one of `stages`."""
    elements: dict[nn.Parameter, int] = {}
    splits = {**(tensor.splits if tensor else {}), **(experts.splits if experts else {})}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if split is None or not set(stages).isdisjoint(split.stages_of(name)):
            cut = splits.get(name)
            size = parameter.numel()
            elements[parameter] = size if cut is None else size // cut.size * cut.local_size(0)
    return elements


def parameters_on(
    module: nn.Module,
    stage: int,
    split: PipelineSplit | None,
    tensor: TensorPlan | None,
    experts: ExpertPlan | None = None,
) -> int:
    """Number of parameters on the first rank of a stage. Parameters of several stages count on each."""
    return sum(elements_on_stages(module, [stage], split, tensor, experts).values())


def expected_states(
    module: nn.Module,
    layout: Layout,
    split: PipelineSplit | None,
    tensor: TensorPlan | None,
    experts: ExpertPlan | None = None,
) -> list[StateBytes]:
    """Bytes of weights, gradients and one optimizer state on a rank of each pipeline rank, by the ZeRO table.

    `with_states` turns one optimizer state into those of an optimizer. Under a pipeline, weights are gathered and
    gradients reduced once per step, so ZeRO stages 2 and 3 need as much memory as stage 1.
    """
    stage = 3 if layout.offload == "all" else layout.zero_stage
    stage = min(layout.zero_stage, 1) if layout.pipelined else stage
    ranks = layout.shard_size * layout.context_parallel_size
    expected = []
    shared = {
        module.get_parameter(f"{name}.{own}"): 1 if each.listed else expert_replicas(layout)
        for name, each in (experts.modules.items() if experts is not None else ())
        for own in each.parameters
    }
    """Ranks that have shards of an expert: those of a list are copied."""
    shared |= {parameter: 1 for parameter in module.parameters() if is_whole(parameter)}
    unpacking = StateBytes(weights=sum(tensor.nbytes for tensor in scales(module)), gradients=0, optimizer=0)
    for pipeline_rank in range(layout.sizes[PIPELINE_AXIS]):
        own = split.stages_on(pipeline_rank, layout.sizes[PIPELINE_AXIS], layout.schedule) if split else (0,)
        elements = elements_on_stages(module, own, split, tensor, experts)
        total = unpacking
        for sharing in {ranks, expert_replicas(layout), 1}:
            alike = {p: size for p, size in elements.items() if shared.get(p, ranks) == sharing}
            total += sharded_states(_full(alike), 1, stage=stage, ranks=sharing)
        expected.append(offloaded(total, layout)[0])
    return expected


def _full(elements: Mapping[nn.Parameter, int]) -> StateBytes:
    """The bytes of parameters that are not sharded over the data axis."""
    weights = sum(size * parameter.element_size() for parameter, size in elements.items())
    trained = sum(size * parameter.element_size() for parameter, size in elements.items() if parameter.requires_grad)
    return StateBytes(weights=weights, gradients=trained, optimizer=trained)


def with_states(expected: Sequence[StateBytes], states: float) -> list[StateBytes]:
    """`expected` with `states` states of a parameter's size: Adam has 2, SGD without momentum none."""
    return [replace(each, optimizer=states * each.optimizer) for each in expected]
