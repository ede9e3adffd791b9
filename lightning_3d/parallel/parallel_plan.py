"""The plan of the parallelisms of one module: made on the unsplit module, equal on every rank."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, get_args

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.activations.recompute_blocks import KEEP_ALL, Recompute, one_block_at_a_time
from lightning_3d.axes.group import Group
from lightning_3d.context.cut_plan import ContextPlan
from lightning_3d.context.find_cuts import plan_context
from lightning_3d.data.same_samples import compare_first_batch
from lightning_3d.errors import NO_PIPELINE, ConfigurationError, UnsupportedError, WritesError, check_one_of
from lightning_3d.experts.expert_plan import ExpertPlan
from lightning_3d.experts.prove_experts import plan_experts
from lightning_3d.layout import PIPELINE_AXIS, Layout
from lightning_3d.module.anatomy import Anatomy
from lightning_3d.offload.offload_choice import NOTHING, Offload
from lightning_3d.pipeline.observe import UncutRun
from lightning_3d.pipeline.observe_batch import (
    MICROBATCH,
    ONE_STAGE,
    ChosenScope,
    LossScope,
    choose_scope,
    observe_one_batch,
)
from lightning_3d.pipeline.schedule import stages_per_rank
from lightning_3d.pipeline.split import PipelineSplit, plan_split
from lightning_3d.precision import Precision3D
from lightning_3d.ranks import agreement, talk
from lightning_3d.ranks.rank_zero import rank_local
from lightning_3d.sandbox.deferred import computed_on_use
from lightning_3d.sandbox.first_batch import FirstBatch
from lightning_3d.sandbox.trial import undone_effects
from lightning_3d.tensor.block_calls import CallRecorder, Recording, record_one_batch, records
from lightning_3d.tensor.plan_module import SEQUENCE, plan_tensor
from lightning_3d.tensor.tensor_plan import TensorPlan


@dataclass(frozen=True, kw_only=True)
class UserChoices:
    """Settings of the user about one module that are not part of the layout."""

    pipeline_split: Sequence[str] | None = None
    """Names of the first block of each stage but the first."""
    loss_scope: LossScope = "auto"
    """"batch" computes the loss once on the full batch, "microbatch" once per microbatch, "auto" as the loss needs."""
    tensor_plan: Mapping[str, str] | None = None
    """Patterns of names -> how to split them."""
    recompute: Recompute = KEEP_ALL
    """Activations that backward computes again."""
    offload: Offload = NOTHING
    """Tensors outside of the device."""

    def __post_init__(self) -> None:
        check_one_of("loss_scope", self.loss_scope, get_args(LossScope))
        if not isinstance(self.tensor_plan, Mapping | None) or isinstance(self.pipeline_split, str | Mapping):
            raise ConfigurationError(
                f"tensor_plan={self.tensor_plan!r}, pipeline_split={self.pipeline_split!r}: the first one is a dict of"
                ' names of modules or patterns, as {"net.head": "whole"}, and the second one a list of names of blocks.'
            )


@dataclass(frozen=True)
class ParallelPlan:
    """Everything that is going to be done to a module. Decided on the unsplit module, equal on every rank."""

    anatomy: Anatomy
    split: PipelineSplit | None = None
    tensor: TensorPlan | None = None
    context: ContextPlan | None = None
    experts: ExpertPlan | None = None
    uncut_run: UncutRun | None = None
    """One microbatch, run by the module before it is cut."""
    scope: ChosenScope = MICROBATCH
    recompute: Recompute = KEEP_ALL
    offload: Offload = NOTHING


def make_plan(
    trainer: Trainer,
    module: LightningModule,
    layout: Layout,
    mesh: DeviceMesh,
    choices: UserChoices,
    to_device: Callable[[Any], Any],
    plugin: Precision3D,
) -> ParallelPlan:
    """Decide on the unsplit module what will be done to it, the same on every rank. Collective."""
    anatomy, first_batch = Anatomy.of(module), FirstBatch(trainer)
    split = plan_pipeline(module, anatomy, layout, None)
    uncut_run = None
    cut = split is not None and not split.has_one_stage
    tensor_ranks, context_ranks = layout.tensor_parallel_size, layout.context_parallel_size
    if trainer.state.fn != TrainerFn.FITTING:
        context_ranks = 1  # evaluation computes whole
    proves = tensor_ranks > 1 or context_ranks > 1
    recorder = CallRecorder(module) if proves and records(module) else None
    if cut or recorder is not None:  # a batch is read ahead of training
        compare_first_batch(first_batch, layout)
    if split is not None and cut:
        units = [unit.name for unit in split.units]
        _ = trainer.log_dir  # a broadcast, made now on all ranks: a pipelined step may read it on one rank
        with one_block_at_a_time(module, units, plugin.forward_context) as context:
            uncut_run = observe_one_batch(
                first_batch, module, units, layout, to_device, context, choices.loss_scope,
                groups=[mesh.get_group(axis) for axis in layout.peer_axes],
                on_full_batch=nullcontext if recorder is None else recorder.recording,
            )  # fmt: skip
    split = plan_pipeline(module, anatomy, layout, choices.pipeline_split, uncut_run)
    tensor: TensorPlan | None = None
    parts: ContextPlan | None = None
    calls = _calls_of(first_batch, module, layout, to_device, recorder, cut) if proves else None
    if context_ranks > 1:
        alone = tensor_ranks == layout.expert_parallel_size == 1
        proven = talk.from_first(lambda: plan_context(module, context_ranks, calls, alone=alone))
        parts = keep_whole_units(proven, split)
    experts = plan_shared_experts(module, layout.expert_parallel_size, split)
    if tensor_ranks > 1:

        def proven_plan() -> TensorPlan:
            with undone_effects(module):  # of the user's hooks on blocks, which rank 0 alone calls
                written, sequence = with_whole(choices.tensor_plan, experts), layout.sequence_parallel
                return plan_tensor(module, tensor_ranks, tensor_plan=written, sequence_parallel=sequence, calls=calls)

        tensor = talk.from_first(proven_plan)
        tensor = keep_within_stages(tensor, split)
        _check_apart(tensor, experts)
    scope = MICROBATCH
    if split is not None and trainer.state.fn == TrainerFn.FITTING:
        scope = ONE_STAGE if split.has_one_stage else choose_scope(choices.loss_scope, uncut_run, layout)
    return ParallelPlan(anatomy, split, tensor, parts, experts, uncut_run, scope, choices.recompute, choices.offload)


def plan_shared_experts(module: nn.Module, owners: int, split: PipelineSplit | None) -> ExpertPlan | None:
    """The experts that `owners` data ranks share. Raise where other stages would need some. Collective."""
    if owners == 1:
        return None
    experts = talk.from_first(lambda: plan_experts(module, owners))
    for name in () if split is None else sorted(experts.splits.keys() & set(split.everywhere))[:1]:
        raise UnsupportedError(
            f"training_step reads {name!r} outside of its block. Under expert_parallel_size={owners} each data rank"
            " has some of these experts, and under a pipeline other stages have none of them. Use"
            " expert_parallel_size=1."
        )
    return experts


def with_whole(written: Mapping[str, str] | None, experts: ExpertPlan | None) -> Mapping[str, str] | None:
    """The user's tensor plan, in which tensor ranks do not divide experts that data ranks share."""
    if experts is None:
        return written
    shared = [
        f"{name}.{own}".rstrip(".")
        for name, each in experts.modules.items()
        for own in (each.parameters if each.gathered else (each.listed,))
    ]
    for name in shared:
        if named := [key for key in written or {} if name == key or name.startswith(f"{key}.")]:
            raise UnsupportedError(
                f"tensor_plan names {named[0]!r}, and expert_parallel_size={experts.size} divides the experts {name!r}"
                " among data ranks. Leave it out of tensor_plan, or use expert_parallel_size=1."
            )
    return {**(written or {}), **dict.fromkeys(shared, "whole")}


def _check_apart(tensor: TensorPlan, experts: ExpertPlan | None) -> None:
    """Raise where tensor ranks compute experts that data ranks share in another way than one device."""
    if experts is None:
        return
    for name, unit in tensor.units.items():
        inside = f"{name}." if name else ""
        changed = {inside + each for each in (*unit.slices, *unit.summed, *unit.shared, *dict(unit.holders))}
        if both := sorted(changed & experts.splits.keys()):
            raise UnsupportedError(
                f"expert_parallel_size={experts.size} with tensor_parallel_size={tensor.size}: the tensor ranks use"
                f" {both[0]} inside of a divided region, so its gradient would be a part of the sum. Write"
                f' tensor_plan={{"{name}": "whole"}}, or use one of the two.'
            )


def _calls_of(
    first_batch: FirstBatch,
    module: LightningModule,
    layout: Layout,
    to_device: Callable[[Any], Any],
    recorder: CallRecorder | None,
    cut: bool,
) -> Recording | None:
    """The record for the plans that rank 0 makes. Collective.

    A step may send messages to all ranks, so all of them run it. One that a pipeline cuts may send to data ranks only,
    so one peer of each data rank runs it.
    """
    trainer = first_batch.trainer
    place = layout.coordinate(trainer.global_rank)
    lone = cut and trainer.state.fn == TrainerFn.FITTING and not Group().simulated

    def record() -> Recording | None:
        if lone and not place.leads:
            return None
        with computed_on_use(module), rank_local() if lone else nullcontext():
            return record_one_batch(first_batch, module, to_device, recorder)

    return agreement.together(record, WritesError)


def plan_pipeline(
    module: nn.Module, anatomy: Anatomy, layout: Layout, cuts: Sequence[str] | None, uncut_run: UncutRun | None = None
) -> PipelineSplit | None:
    """The cut of `module` into stages, None with one pipeline rank."""
    if not layout.pipelined:
        return None
    per_rank = stages_per_rank(layout.schedule, layout.stages_per_rank)
    return plan_split(module, anatomy, layout.sizes[PIPELINE_AXIS] * per_rank, cuts=cuts, uncut=uncut_run)


def keep_whole_units(context: ContextPlan, split: PipelineSplit | None) -> ContextPlan:
    """`context` without the blocks inside of which `split` cuts. Raise where none is left."""
    names = [] if split is None else [block for blocks in split.stages for block in blocks]
    inside = [name for name in context.blocks if any(block.startswith(f"{name}.") for block in names)]
    blocks = {name: cut for name, cut in context.blocks.items() if name not in inside}
    if not blocks:
        raise UnsupportedError(
            f"context_parallel_size={context.size} divides nothing under this pipeline, which cuts through each block"
            f" that could be divided ({', '.join(inside)}). Use {NO_PIPELINE}, or context_parallel_size=1."
        )
    return replace(
        context, blocks=blocks, whole={**context.whole, **dict.fromkeys(inside, "the pipeline cuts through it")}
    )


def keep_within_stages(tensor: TensorPlan, split: PipelineSplit | None) -> TensorPlan:
    """`tensor` without the blocks that `split` cuts through: a weight that tensor ranks shard must stay on one stage.

    The pipeline may cut between children of a block. Then the output of each child is full and the sequence is not
    sharded, since on some ranks the block itself is on another stage and gathers nothing.
    """
    if split is None:
        return tensor
    units, splits, unsplit = dict(tensor.units), dict(tensor.splits), dict(tensor.unsplit)
    for name in tensor.units:
        inside = f"{name}." if name else ""
        stages = {stage for stage, blocks in enumerate(split.stages) for block in blocks if block.startswith(inside)}
        if len(stages) > 1:
            del units[name]
            splits = {key: value for key, value in splits.items() if not key.startswith(inside)}
            unsplit[name] = f"the pipeline cuts through it (stages {', '.join(map(str, sorted(stages)))})"
            rank_zero_warn(f"{name or 'The module'} is not split over the tensor ranks: {unsplit[name]}.")
        elif stages and units[name].sequence is not None:
            units[name] = replace(units[name], sequence=None)
            unsplit[f"{inside}{SEQUENCE}"] = "the pipeline cuts between its children"
    return replace(tensor, units=units, splits=splits, unsplit=unsplit)
