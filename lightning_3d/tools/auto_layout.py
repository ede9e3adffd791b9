"""`layout="auto"`: the planner's choice for this module, its first batch and the devices that are there.

A training step run ahead, on tensors that have shapes and no memory.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Protocol
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lightning_3d.context.find_cuts import plan_context
from lightning_3d.errors import LayoutError, UnsupportedError
from lightning_3d.experts.prove_experts import plan_experts
from lightning_3d.layout import GradCompression, Layout
from lightning_3d.module.amounts import divisors
from lightning_3d.module.anatomy import Anatomy
from lightning_3d.module.expert_modules import routed_experts
from lightning_3d.module.packed_weights import is_packed, is_whole
from lightning_3d.module.torch_private import FakeTensorMode, own_tensors
from lightning_3d.module.undo import replaced_entries
from lightning_3d.optim.state_bytes import PRECISIONS, Precision
from lightning_3d.pipeline.microbatch import TENSORS, auto_microbatches
from lightning_3d.pipeline.schedule import stages_per_rank
from lightning_3d.pipeline.units import find_units
from lightning_3d.ranks import random_streams, talk
from lightning_3d.sandbox.first_batch import FirstBatch, step_arguments
from lightning_3d.sandbox.record import Record
from lightning_3d.sandbox.trees import map_leaves
from lightning_3d.sandbox.trial import trial
from lightning_3d.sandbox.without_values import ShapesOnly
from lightning_3d.tensor.block_calls import record_one_batch
from lightning_3d.tensor.plan_module import plan_tensor
from lightning_3d.tools.planner.choose import Ability, Fixed, Loading, choose_layout
from lightning_3d.tools.planner.hardware import Cluster
from lightning_3d.tools.planner.job import Offloaded, Options
from lightning_3d.tools.planner.local_cluster import cluster_here
from lightning_3d.tools.planner.profile import Profile
from lightning_3d.tools.planner.profile_module import CostTrace, count_module, measured_profile, traced

WORTH = 0.5
"""Share of the blocks' parameters that a tensor plan must divide for the planner to count on it."""


class Processes(Protocol):
    """The processes of a job, as far as a choice of layout needs them."""

    world_size: int
    ranks_per_node: int
    root_device: torch.device
    precision_plugin: Any


Decided = tuple[Layout, str]


class AutoLayout:
    """Chooses what `fixed` leaves open in `base`, once module and data are there. `options` are priced."""

    def __init__(self, base: Layout, fixed: Fixed, options: Options) -> None:
        self.base, self.given, self.options = base, fixed, options
        self.chosen: Layout | None = None
        self.data: int | None = None
        """Data ranks with which a run that is resumed keeps its global batch."""

    @property
    def fixed(self) -> Fixed:
        """The degrees that are not open to choice."""
        return self.given if self.data is None else replace(self.given, data=self.data)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "chosen": None, "data": None}  # a copy may run on other devices

    def layout(self, world_size: int) -> Layout:
        """The choice; before it, what was given with as much data parallelism as that leaves."""
        if self.chosen is not None and self.chosen.world_size == world_size:
            return self.chosen
        return first_guess(self.base, self.fixed, world_size)

    def choose(
        self, trainer: Trainer, module: LightningModule, processes: Processes, to_device: Callable[[Any], Any]
    ) -> None:
        """Choose for `trainer.fit`, or for an evaluation without a choice yet, and say it. Every rank calls it."""
        fitting = trainer.state.fn == TrainerFn.FITTING
        if self.chosen is not None and self.chosen.world_size == processes.world_size and not fitting:
            return
        self.chosen = None  # data is loaded as for the first guess
        situation = Situation(self.base, self.fixed, self.options, trainer, module, processes, to_device)
        self.chosen, why = decide(situation)
        rank_zero_info(why)

    def data_sizes(self, world_size: int) -> list[int]:
        """Data ranks that a choice could have, most first."""
        peers = (self.given.tensor or 1) * (self.given.pipeline or 1) * (self.given.context or 1)
        sizes = [size for size in divisors(world_size) if world_size // size % peers == 0]
        return sizes[::-1] if self.given.data is None else [self.given.data]


def layout_chooser(
    base: Layout, *, compression: GradCompression | None, offload: Offloaded | None, **degrees: Any
) -> AutoLayout:
    """The chooser of a strategy, which names `degrees` as `Fixed` does."""
    fixed, options = Fixed(**degrees), Options(compression=compression, offload=offload)
    return AutoLayout(replace(base, expert_parallel_size=1), fixed, options)


@dataclass(frozen=True)
class Situation:
    """The basis of a choice."""

    base: Layout
    fixed: Fixed
    options: Options
    trainer: Trainer
    module: LightningModule
    processes: Processes
    to_device: Callable[[Any], Any]
    cluster: Cluster | None = None
    """Another than that of the processes: that of a dry run."""

    @property
    def precision(self) -> Precision:
        return PRECISIONS.get(str(self.processes.precision_plugin.precision), "32")


def first_guess(base: Layout, fixed: Fixed, world_size: int) -> Layout:
    """The given degrees, with the rest of `world_size` as data ranks. Raise where nothing multiplies to it."""
    open_sizes = divisors(world_size)
    for tensor, pipeline in product(
        open_sizes if fixed.tensor is None else [fixed.tensor],
        open_sizes if fixed.pipeline is None else [fixed.pipeline],
    ):
        data, rest = divmod(world_size, tensor * pipeline * base.context_parallel_size)
        if rest == 0 and fixed.data in (None, data):
            return replace(
                base,
                data_parallel_size=data,
                tensor_parallel_size=tensor,
                pipeline_parallel_size=pipeline,
                zero_stage=base.zero_stage if fixed.zero is None else fixed.zero,
            )
    raise LayoutError(
        f'layout="auto" with {fixed}: no layout of {world_size} ranks has that. The three sizes multiply to the number'
        " of processes (devices x num_nodes): leave one of them open, or start another number."
    )


def decide(situation: Situation) -> Decided:
    """The layout and three lines about it, the same on every rank. Every rank calls it, with the whole module."""
    module = situation.module
    seen = Seen(count_module(module, name=type(module).__name__, precision=situation.precision))
    ability = able(module, situation.base)
    if situation.trainer.state.fn == TrainerFn.FITTING and module.automatic_optimization:
        seen = measure_step(situation.trainer, module, situation.to_device, seen.profile, situation.precision)
    ability = replace(ability, reasons=(*ability.reasons, *seen.problems))
    layout, why = _choose(situation, seen, ability)
    if layout.tensor_parallel_size > 1 and situation.fixed.tensor is None:
        share = _tensor_share(situation, layout.tensor_parallel_size)
        if share < WORTH:
            reason = f"tensor parallelism would divide only {share:.0%} of the blocks' parameters"
            ability = replace(ability, tensor=False, reasons=(*ability.reasons, reason))
            layout, why = _choose(situation, seen, ability)
    open_size = layout.expert_parallel_size if situation.fixed.experts is None else 1
    planned = lambda: plan_experts(module, open_size).whole  # noqa: E731
    if open_size > 1 and (refusal := _refusal(planned, "the experts of {} stay on every data rank: {}")):
        ability = replace(ability, experts=(), reasons=(*ability.reasons, refusal))
        layout, why = _choose(situation, seen, ability)
    if layout.context_parallel_size > 1 and situation.fixed.context is None and (refusal := _whole(situation, layout)):
        layout, why = _choose(situation, seen, replace(ability, context=False, reasons=(*ability.reasons, refusal)))
    return layout, why


def _whole(situation: Situation, layout: Layout) -> str:
    """The reason for which context ranks cannot divide all blocks, "" where they can; that of rank 0."""
    size = layout.context_parallel_size
    calls = record_one_batch(FirstBatch(situation.trainer), situation.module, situation.to_device)
    alone = layout.tensor_parallel_size == layout.expert_parallel_size == 1
    plan = lambda: plan_context(situation.module, size, calls, alone=alone)  # noqa: E731
    return _refusal(lambda: plan().whole, "{} would compute whole sequences: {}")


def _refusal(plan: Callable[[], Mapping[str, str]], says: str) -> str:
    """The reason of `plan`, or `says` of the first module that it leaves whole, "" where it leaves none."""

    def prove() -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of the plan of the chosen layout are the user's
            try:
                whole = plan()
            except UnsupportedError as error:
                return str(error)
        return next((says.format(name, why) for name, why in whole.items()), "")

    return talk.from_first(prove)


def _choose(situation: Situation, seen: "Seen", ability: Ability) -> Decided:
    processes = situation.processes
    size = processes.ranks_per_node
    sizes = {"devices_per_node": size, "nodes": processes.world_size // size}
    return talk.from_first(
        lambda: choose_layout(
            seen.profile,
            situation.cluster or cluster_here(processes.root_device.type, **sizes),
            loading=seen.loading,
            pieces=auto_microbatches,
            base=situation.base,
            fixed=situation.fixed,
            ability=ability,
            precision=situation.precision,
            options=situation.options,
        )
    )


def able(module: LightningModule, base: Layout) -> Ability:
    if not module.automatic_optimization:
        return Ability(tensor=False, pipeline=1, reasons=("manual optimization is left to data parallelism",))
    experts = tuple(found.count for found in routed_experts(module))
    if packed := [*filter(is_packed, module.parameters())]:
        reasons = ("quantised weights are not cut into stages",)
        return Ability(tensor=not any(map(is_whole, packed)), pipeline=1, experts=experts, reasons=reasons)
    units = len(find_units(module, Anatomy.of(module), 2))
    if units < 2:
        return Ability(pipeline=1, experts=experts, reasons=("it has no blocks that a pipeline could cut between",))
    most = units // stages_per_rank(base.schedule, base.stages_per_rank)
    return Ability(pipeline=most, experts=experts, context=True)


def _tensor_share(situation: Situation, size: int) -> float:
    """The share of the blocks' parameters that a proven plan divides; on every rank what rank 0 finds."""
    module = situation.module
    calls = record_one_batch(FirstBatch(situation.trainer), module, situation.to_device)

    def prove() -> float:
        plan = plan_tensor(module, size, calls=calls)
        blocks = tuple(f"{name}." for name in Anatomy.of(module).blocks)
        sizes = {name: p.numel() for name, p in module.named_parameters() if name.startswith(blocks)}
        return sum(count for name, count in sizes.items() if name in plan.splits) / max(1, sum(sizes.values()))

    return talk.from_first(prove)


@dataclass(frozen=True)
class Seen:
    """The findings about a module's step."""

    profile: Profile
    loading: Loading | None = None
    """The samples of a step; None where they could not be counted."""
    problems: tuple[str, ...] = ()


def measure_step(
    trainer: Trainer,
    module: LightningModule,
    to_device: Callable[[Any], Any],
    counted: Profile,
    precision: Precision = "32",
) -> Seen:
    """The costs of `training_step` on the first batch, run on tensors without memory."""
    with random_streams.restored_streams():
        batch = to_device(FirstBatch(trainer)())
    rows = TENSORS.count(batch)
    if not rows:
        return Seen(counted, problems=("the samples in a batch could not be counted, so activations are not known",))
    trace = CostTrace(samples=rows, precision=precision)
    try:
        run_ahead(module, batch, trace)
    except Exception as error:  # what user code cannot do without real numbers: `.item()`, numpy ...
        problem = f"{type(error).__name__}: {' '.join(str(error).split())[:80]}"
        return Seen(counted, problems=(f"the step cannot be run ahead ({problem}), so activations are not known",))
    return Seen(
        measured_profile(module, trace, name=counted.name),
        Loading(samples=rows, accumulate=trainer.accumulate_grad_batches),
    )


def run_ahead(module: LightningModule, batch: Any, trace: CostTrace) -> tuple[Any, Record]:
    """Note in `trace` what `training_step` does with `batch`; what it returned and logged. Nothing is changed."""
    mode = ShapesOnly(allow_non_fake_inputs=True)
    mode.answers = False  # the costs of a step that depends on values are not known
    step = module.training_step
    fakes = map_leaves(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, batch)
    with trial(module, gradients=True) as record, fake_tensors(module, mode), mode, traced(module, trace):
        return step(*step_arguments(step, fakes)), record


@contextmanager
def fake_tensors(module: nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """`module` with parameters and buffers that have shapes and no memory, tied ones still tied.

    What is assigned to attributes of its parts meanwhile is forgotten.
    """
    made: dict[int, Any] = {}
    fakes = [
        (held, name, made.setdefault(id(real), mode.from_tensor(real))) for held, name, real in own_tensors(module)
    ]
    with ExitStack() as stack:
        for part in module.modules():
            stack.enter_context(patch.dict(vars(part)))
        stack.enter_context(replaced_entries(fakes))
        yield
