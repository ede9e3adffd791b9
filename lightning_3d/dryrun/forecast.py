"""What each rank of a layout will hold and send for a user's own module, counted from the plans that training will use.

States and bytes are exact, parameter by parameter (without gradient compression, sequence parallelism and the second
axis of hybrid shard). Peak memory and the time of a step are the planner's estimates.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_3d.auto_layout import run_ahead
from lightning_3d.layout import DATA_AXIS, PIPELINE_AXIS, TENSOR_AXIS, Coordinate, Layout
from lightning_3d.module.anatomy import Anatomy
from lightning_3d.parallelize import ParallelPlan, keep_within_stages, plan_pipeline
from lightning_3d.pipeline.microbatch import auto_microbatches, batch_size
from lightning_3d.pipeline.schedule import stage_ranks
from lightning_3d.planner.exact import ModuleShapes, bytes_sent, module_shapes, states_at_rest
from lightning_3d.planner.formulas import ring_all_reduce
from lightning_3d.planner.hardware import Cluster
from lightning_3d.planner.job import Job
from lightning_3d.planner.memory import rank_memory
from lightning_3d.planner.priced_layout import Plan, price_layout
from lightning_3d.planner.profile import Profile
from lightning_3d.planner.profile_module import Trace, count_module, measured_profile
from lightning_3d.planner.states import StateBytes
from lightning_3d.sandbox.first_batch import step_arguments
from lightning_3d.sandbox.record import Record, combine
from lightning_3d.sandbox.trees import leaves
from lightning_3d.sandbox.trial import trial
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.plan_module import plan_tensor
from lightning_3d.tensor.tensor_plan import UnitPlan

SIZE = 4
"""Bytes of an element: forecasts are for fp32."""


@dataclass(frozen=True, kw_only=True)
class RankForecast:
    """One rank in one optimizer step."""

    coordinate: Coordinate
    states: StateBytes
    """Bytes held between steps."""
    sent: Mapping[str, int]
    """Bytes sent per axis."""
    peak: float
    """Bytes of tensors at the peak of the step."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A step of a module in a layout."""

    ranks: tuple[RankForecast, ...]
    plan: Plan
    """With the time of the step."""


def forecast(module: LightningModule, batch: Any, layout: Layout, cluster: Cluster) -> Forecast:
    """What every rank will hold and send in a step with AdamW in fp32, and how long it takes.

    Args:
        module: whole, with its `training_step`; nothing is changed.
        batch: what one data rank is given.
        layout: for as many ranks as `cluster` has devices.
        cluster: where it will run.
    """
    step = Step(module, batch, layout, cluster)
    ranks = tuple(step.rank(layout.coordinate(rank)) for rank in range(layout.world_size))
    return Forecast(ranks=ranks, plan=step.plan)


@dataclass
class Step:
    """A step of `module` on `batch` in `layout`, before anything is placed."""

    module: LightningModule
    batch: Any
    layout: Layout
    cluster: Cluster
    trace: Trace = field(default_factory=Trace)
    output: tuple[Any, Record] | None = None

    def __post_init__(self) -> None:
        self.rows = batch_size(self.batch) or 1
        self.trace.samples = self.rows
        self.output = run_ahead(self.module, self.batch, self.trace)
        self.profile = measured_profile(count_module(self.module, name=type(self.module).__name__), self.trace)

    @cached_property
    def microbatches(self) -> int:
        if self.layout.pipeline_parallel_size == 1:
            return 1
        given = self.layout.num_microbatches
        return auto_microbatches(self.rows, self.layout.pipeline_parallel_size) if given == "auto" else given

    @cached_property
    def plan(self) -> Plan:
        samples = self.rows * self.layout.data_parallel_size
        job = Job(profile=self._with_sums(), samples=samples, batch=samples, precision="32")
        return price_layout(job, self.cluster, self.layout, micro=self.rows // self.microbatches)

    def _with_sums(self) -> Profile:
        """The profile, with as many sums over tensor ranks as the plan has."""
        tensor, profile = self.plans.tensor, self.profile
        if tensor is None:
            return profile
        blocks = sum(map(self._summed, tensor.units.values())) / self.trace.width / profile.layers
        outside = {name.rpartition(".")[0] for name in tensor.vocabulary}
        return replace(profile, block_sums=blocks, outside_sums=len(outside))

    @cached_property
    def plans(self) -> ParallelPlan:
        """What training will do to the module."""
        anatomy = Anatomy.of(self.module)
        split = plan_pipeline(self.module, anatomy, self.layout, None)
        if self.layout.tensor_parallel_size == 1:
            return ParallelPlan(anatomy, split)
        step = self.module.training_step
        with trial(self.module, gradients=False):
            calls = record_calls(self.module, lambda: step(*step_arguments(step, self.batch)))
        tensor = plan_tensor(
            self.module,
            self.layout.tensor_parallel_size,
            calls=calls,
            sequence_parallel=self.layout.sequence_parallel,
        )
        return ParallelPlan(anatomy, split, keep_within_stages(tensor, split))

    @cached_property
    def stage_rank(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        split, ranks = self.plans.split, self.layout.pipeline_parallel_size
        return (0,) if split is None else stage_ranks(self.layout.schedule, ranks, split.num_stages // ranks)

    def rank(self, coordinate: Coordinate) -> RankForecast:
        layout, plan = self.layout, self.plan
        shapes = self._shapes(coordinate)
        shard = layout.zero_shard_size or layout.data_parallel_size
        states = states_at_rest(
            shapes,
            plan.job.per_parameter,
            stage=layout.zero_stage if layout.data_parallel_size > 1 else 0,
            rank=coordinate.data % shard,
            ranks=shard,
        )
        peak = rank_memory(
            plan.job,
            layout,
            stage=coordinate.pipeline,
            micro=plan.micro,
            microbatches=plan.microbatches,
            reserved=0,
        )
        sent = {
            DATA_AXIS: self._data_bytes(shapes),
            TENSOR_AXIS: self._tensor_bytes(coordinate),
            PIPELINE_AXIS: self._pipeline_bytes(coordinate),
        }
        return RankForecast(coordinate=coordinate, states=states, sent=sent, peak=peak.total)

    # ---- what a rank holds -----------------------------------------------------------------------------------------

    def _here(self, name: str, coordinate: Coordinate) -> bool:
        """Whether the pipeline rank holds the parameter `name`."""
        split = self.plans.split
        if split is None or name in split.everywhere:
            return True
        holding = {stage for unit, stages in split.holders.items() if name.startswith(f"{unit}.") for stage in stages}
        holding |= {stage for tie in split.ties if name in tie.names for stage in tie.stages}
        return any(self.stage_rank[stage] == coordinate.pipeline for stage in holding)

    def _shape(self, name: str, parameter: Tensor, coordinate: Coordinate) -> tuple[int, ...]:
        """What a tensor rank holds of it."""
        shape = list(parameter.shape)
        divided = self.plans.tensor.splits.get(name) if self.plans.tensor else None
        if divided is not None:
            shape[divided.dim] = divided.local_size(coordinate.tensor)
        return tuple(shape)

    def _shapes(self, coordinate: Coordinate) -> ModuleShapes:
        def local(name: str, parameter: nn.Parameter) -> tuple[int, ...] | None:
            return self._shape(name, parameter, coordinate) if self._here(name, coordinate) else None

        return module_shapes(self.module, local)

    # ---- what a rank sends -----------------------------------------------------------------------------------------

    def _data_bytes(self, shapes: ModuleShapes) -> int:
        """A pipeline gathers and reduces once per step, whatever the stage."""
        layout = self.layout
        stage = min(layout.zero_stage, 1) if layout.pipeline_parallel_size > 1 else layout.zero_stage
        return bytes_sent(shapes, stage=stage, ranks=layout.data_parallel_size, element_bytes=SIZE)

    def _tensor_bytes(self, coordinate: Coordinate) -> int:
        """Sums at the edges of the split parts of blocks, of the embedding, of the head, and of the loss."""
        tensor, size = self.plans.tensor, self.layout.tensor_parallel_size
        if tensor is None:
            return 0
        positions = self.trace.boundary_elements / self.trace.width
        units = [unit for name, unit in tensor.units.items() if self._runs(name, coordinate)]
        sent = ring_all_reduce(sum(map(self._summed, units)) * positions, size)
        for name in {name.rpartition(".")[0] for name in tensor.vocabulary}:
            if self._runs(name, coordinate):
                sent += self._vocabulary_elements(self.module.get_submodule(name), positions)
        return round(sent * SIZE)

    def _summed(self, unit: UnitPlan) -> int:
        """Elements per position. Arguments beside the stream (rotary tables) need no gradient and so no sum, although
        the proof, which gives every argument one, has counted them."""
        width = self.trace.width
        return unit.summed_per_position // width * width if None in unit.inputs.values() else unit.summed_per_position

    def _vocabulary_elements(self, owner: nn.Module, positions: float) -> float:
        """An embedding sums what it found; a head sums the gradient of its input, and the loss, whose logits stay
        apart, three numbers per position."""
        size = self.layout.tensor_parallel_size
        if isinstance(owner, nn.Embedding):
            return ring_all_reduce(positions * owner.embedding_dim, size)
        assert isinstance(owner, nn.Linear)
        return ring_all_reduce(positions * owner.in_features, size) + ring_all_reduce(3 * positions, size)

    def _runs(self, name: str, coordinate: Coordinate) -> bool:
        """Whether a block runs on the pipeline rank."""
        split = self.plans.split
        if split is None:
            return True
        stages = [stage for stage, units in enumerate(split.stages) if any(_within(name, unit) for unit in units)]
        return any(self.stage_rank[stage] == coordinate.pipeline for stage in stages)

    def _pipeline_bytes(self, coordinate: Coordinate) -> int:
        """Activations and gradients over the cuts, gradients of tied parameters, and the results of the last stage."""
        split, mine = self.plans.split, coordinate.pipeline
        if split is None:
            return 0
        cuts = [(here, there) for here, there in zip(self.stage_rank, self.stage_rank[1:], strict=False)]
        crossings = sum((here == mine) + (there == mine) for here, there in cuts if here != there)
        sent = round(crossings * self.trace.boundary_elements * SIZE)
        if mine == self.stage_rank[-1]:
            sent += self._result_bytes()
        return sent + self._tie_bytes(coordinate)

    def _tie_bytes(self, coordinate: Coordinate) -> int:
        """Each holder sends each other one its gradients, with a flag for each."""
        sent = 0
        assert self.plans.split is not None
        for tie in self.plans.split.ties:
            holders = {self.stage_rank[stage] for stage in tie.stages}
            parameter = self.module.get_parameter(tie.name)
            if coordinate.pipeline in holders and parameter.requires_grad:
                elements = 1
                for length in self._shape(tie.name, parameter, coordinate):
                    elements *= length
                sent += (len(holders) - 1) * (elements + 1) * SIZE
        return sent

    def _result_bytes(self) -> int:
        """What the step returned and logged, as doubles, after one that says whether it has changed its form."""
        assert self.output is not None
        output, record = self.output
        calls = combine([record] * self.microbatches, [1] * self.microbatches).calls
        found = [leaf for leaf in leaves((output, calls)) if _is_number(leaf)]
        return 8 * (1 + len(found))


def _within(name: str, unit: str) -> bool:
    return name == unit or name.startswith(f"{unit}.") or unit.startswith(f"{name}.")


def _is_number(leaf: Any) -> bool:
    return leaf.ndim == 0 if isinstance(leaf, Tensor) else type(leaf) in (int, float)
