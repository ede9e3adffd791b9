"""The parallelisms, composed in order on one module: split -> tensor -> ZeRO; and taken off again.

A new parallelism is a new folder and one more line in `divide`.

From what the user chose to what is done to this module: plans before it is placed, steps after.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_3d.comm.ledger import Ledger
from lightning_3d.layout import PIPELINE_AXIS, TENSOR_AXIS, Layout
from lightning_3d.module.anatomy import Anatomy
from lightning_3d.module.state_dict import full_optimizer_entries, swap_parameters
from lightning_3d.pipeline.context import Hooks
from lightning_3d.pipeline.exchange import Stages
from lightning_3d.pipeline.observe import UncutRun, observe_one_batch
from lightning_3d.pipeline.pipeline import Pipeline
from lightning_3d.pipeline.schedule import stage_ranks, stages_per_rank
from lightning_3d.pipeline.split import AppliedSplit, PipelineSplit, apply_split, plan_split
from lightning_3d.precision import Precision3D
from lightning_3d.ranks.mesh import shard_mesh
from lightning_3d.sandbox.same_batch import compare_first_batch
from lightning_3d.tensor.apply import AppliedTensor, apply_tensor, full_tensor, shard_of
from lightning_3d.tensor.block_calls import record_one_batch
from lightning_3d.tensor.geometry import TensorSplit
from lightning_3d.tensor.late_gather import pass_late_gather
from lightning_3d.tensor.plan_module import SEQUENCE, plan_tensor
from lightning_3d.tensor.tensor_plan import TensorPlan
from lightning_3d.zero import DataParallel, NoData, ReplicatedData, ShardedData
from lightning_3d.zero.data_axis import DataAxis


@dataclass(frozen=True)
class ParallelPlan:
    """What is to be done to a module, decided on the whole of it; equal on every rank."""

    anatomy: Anatomy
    split: PipelineSplit | None = None
    tensor: TensorPlan | None = None
    whole: UncutRun | None = None
    """What a microbatch showed of the module before it is cut."""


def plan_pipeline(
    module: nn.Module, anatomy: Anatomy, layout: Layout, cuts: Sequence[str] | None, whole: UncutRun | None = None
) -> PipelineSplit | None:
    """How `module` is cut into stages, None with one pipeline rank."""
    if layout.pipeline_parallel_size == 1:
        return None
    per_rank = stages_per_rank(layout.schedule, layout.stages_per_rank)
    return plan_split(module, anatomy, layout.pipeline_parallel_size * per_rank, cuts=cuts, whole=whole)


def keep_within_stages(tensor: TensorPlan, split: PipelineSplit | None) -> TensorPlan:
    """`tensor` without the blocks that `split` cuts through: what is divided over ranks must not change stages.

    Where the pipeline knows parts of a block one by one, what leaves a part must be whole, also where the block itself
    is on another stage and gathers nothing: there the sequence stays whole.
    """
    if split is None:
        return tensor
    units, splits, whole = dict(tensor.units), dict(tensor.splits), dict(tensor.unsplit)
    for name in tensor.units:
        inside = f"{name}." if name else ""
        stages = {stage for stage, blocks in enumerate(split.stages) for block in blocks if block.startswith(inside)}
        if len(stages) > 1:
            del units[name]
            splits = {key: value for key, value in splits.items() if not key.startswith(inside)}
            whole[name] = f"the pipeline cuts through it (stages {', '.join(map(str, sorted(stages)))})"
            rank_zero_warn(f"{name or 'The module'} is not split over the tensor ranks: {whole[name]}.")
        elif stages and units[name].sequence is not None:
            units[name] = replace(units[name], sequence=None)
            whole[f"{inside}{SEQUENCE}"] = "the pipeline knows its parts one by one"
    return replace(tensor, units=units, splits=splits, unsplit=whole)


@dataclass
class ParallelModule:
    """A module to which everything has been applied."""

    module: nn.Module
    data: DataParallel = field(default_factory=NoData)
    tensor: AppliedTensor | None = None
    split: AppliedSplit | None = None
    stages: Stages | None = None
    originals: Mapping[str, nn.Parameter] = field(default_factory=dict)
    hooks: list[RemovableHandle] = field(default_factory=list)
    splits: Mapping[nn.Parameter, TensorSplit] = field(default_factory=dict)

    @property
    def swaps(self) -> dict[nn.Parameter, nn.Parameter]:
        """What was registered before -> what is registered now, for parameters that were replaced."""
        now = dict(self.module.named_parameters())
        return {old: now[name] for name, old in self.originals.items() if now[name] is not old}

    @property
    def plain(self) -> bool:
        """Whether the module is as its author made it."""
        return isinstance(self.data, NoData) and self.tensor is None and self.split is None

    def whole(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        """`tensor`, divided like `parameter`, in one piece. Collective over the data and tensor axes."""
        tensor = self.data.whole(parameter, tensor)
        split = self.splits.get(parameter)
        return full_tensor(tensor, split) if split is not None else tensor

    def part(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """This rank's part of `whole`, divided like `parameter`."""
        if parameter.is_meta:
            return torch.empty_like(whole, device="meta")
        split = self.splits.get(parameter)
        if split is not None and self.tensor is not None:
            whole = shard_of(whole.to(parameter.device), split, self.tensor.mesh)
        return self.data.part(parameter, whole)

    def counted(self, parameter: nn.Parameter) -> bool:
        """Whether this rank's stage is the one that counts a parameter which several stages hold."""
        return self.stages is None or self.stages.counts(parameter)

    @torch.no_grad()
    def undo(self, optimizers: Sequence[Optimizer]) -> None:
        """Make the module plain and whole again, and `optimizers` hold its parameters and whole states. Collective."""
        if self.plain:
            return
        self.data.rest()
        entries = [full_optimizer_entries(optimizer, self.whole, self.stages) for optimizer in optimizers]
        before = dict(self.module.named_parameters(remove_duplicate=False))
        for hook in self.hooks:
            hook.remove()
        self.data.undo()
        if self.tensor is not None:
            self.tensor.undo()
        if self.split is not None and self.stages is not None:
            self.split.undo(self.stages.group, self.stages.stage_rank)
        after = dict(self.module.named_parameters(remove_duplicate=False))
        swap_parameters(optimizers, {before[name]: after[name] for name in before}, entries)


def cut(module: nn.Module, plans: ParallelPlan, layout: Layout, mesh: DeviceMesh) -> ParallelModule:
    """Keep the stages of this rank, in place. Every rank calls it, with equal weights."""
    result = ParallelModule(module, originals=dict(module.named_parameters()))
    if plans.split is not None:
        group = mesh.get_group(PIPELINE_AXIS)
        per_rank = plans.split.num_stages // group.size()
        ranks = stage_ranks(layout.schedule, group.size(), per_rank)
        mine = [stage for stage, rank in enumerate(ranks) if rank == group.rank()]
        result.split = apply_split(module, plans.split, mine)
        result.stages = Stages(plans.split, group, ranks)
        _free_foreign(result.swaps)
    return result


def divide(
    result: ParallelModule,
    plans: ParallelPlan,
    layout: Layout,
    mesh: DeviceMesh,
    communication: DataAxis,
    policy: MixedPrecisionPolicy,
    *,
    training: bool,
) -> None:
    """Apply the rest of `plans` to what was `cut`, in place. Every rank calls it.

    Args:
        training: without it no optimizer states or gradients exist, so that only stage 3 has something to shard.
    """
    module = result.module
    if plans.tensor is not None and plans.tensor.splits:
        result.tensor = apply_tensor(module, plans.tensor, mesh[TENSOR_AXIS], ledger=communication.ledger)
    result.data = _shard(module, plans, layout, mesh, communication, policy, training)
    result.splits = _splits_of(module, result.tensor)
    if result.tensor is not None and isinstance(result.data, ShardedData):
        result.hooks = [
            block.register_forward_pre_hook(pass_late_gather, prepend=True, with_kwargs=True)
            for block in result.data.blocks
        ]
    if result.stages is not None:
        result.stages.locate_parameters(module)


def _free_foreign(swaps: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Free what other stages hold: optimizers find their parameters by the old ones, which live on, empty."""
    for old in swaps:
        old.data = old.data.new_empty(0)


def _shard(
    module: nn.Module,
    plans: ParallelPlan,
    layout: Layout,
    mesh: DeviceMesh,
    communication: DataAxis,
    policy: MixedPrecisionPolicy,
    training: bool,
) -> DataParallel:
    if layout.data_parallel_size == 1 or not (training or layout.zero_stage == 3):
        return NoData()
    if layout.zero_stage == 0:
        here = [parameter for parameter in module.parameters() if not parameter.is_meta]
        return ReplicatedData(communication.replicas(here))
    return ShardedData(
        module,
        plans.anatomy,
        stage=layout.zero_stage,
        mesh=shard_mesh(mesh),
        policy=policy,
        offload=layout.offload == "all",
        pipelined=plans.split is not None,
        attach=communication.attach,
        replicate=communication.replicas,
    )


def _splits_of(module: nn.Module, tensor: AppliedTensor | None) -> dict[nn.Parameter, TensorSplit]:
    if tensor is None:
        return {}
    named = dict(module.named_parameters(remove_duplicate=False))
    return {named[name]: split for name, split in tensor.splits.items() if not named[name].is_meta}


LossScope = Literal["microbatch", "batch"]
OnRankZero = Callable[[Callable[[], TensorPlan]], TensorPlan]
"""Decides on rank 0 and tells every rank, also what went wrong."""


@dataclass(frozen=True, kw_only=True)
class UserChoices:
    """What the user chose about one module, beside the layout."""

    pipeline_split: Sequence[str] | None = None
    """Names of the first block of each stage but the first."""
    loss_scope: LossScope = "microbatch"
    """Whether the loss is computed per microbatch or once on the whole batch."""
    tensor_plan: Mapping[str, str] | None = None
    """Patterns of names -> how to split them."""


def make_plans(
    trainer: Trainer,
    module: LightningModule,
    layout: Layout,
    choices: UserChoices,
    to_device: Callable[[Any], Any],
    on_rank_zero: OnRankZero,
    plugin: Precision3D,
) -> ParallelPlan:
    """Decide on the whole module what will be done to it, the same on every rank."""
    compare_first_batch(trainer, layout)
    anatomy = Anatomy.of(module)
    split = plan_pipeline(module, anatomy, layout, None)
    whole = None
    if split is not None and not split.solo:
        units = [unit.name for unit in split.units]
        mean = choices.loss_scope == "microbatch"
        _ = trainer.log_dir  # asked of rank 0 while all ranks do: a pipelined step may ask where it runs alone
        whole = observe_one_batch(trainer, module, units, layout, to_device, plugin.forward_context, mean)
    split = plan_pipeline(module, anatomy, layout, choices.pipeline_split, whole)
    if layout.tensor_parallel_size == 1:
        return ParallelPlan(anatomy, split, whole=whole)
    calls = record_one_batch(trainer, module, to_device)
    tensor = on_rank_zero(
        lambda: plan_tensor(
            module,
            layout.tensor_parallel_size,
            tensor_plan=choices.tensor_plan,
            sequence_parallel=layout.sequence_parallel,
            calls=calls,
        )
    )
    return ParallelPlan(anatomy, split, keep_within_stages(tensor, split), whole)


def pipelines(
    plans: ParallelPlan, layout: Layout, choices: UserChoices, *, mesh: DeviceMesh, device: torch.device, ledger: Ledger
) -> Callable[[nn.Module, Hooks], Pipeline]:
    """What builds the pipeline of a module that was cut by these plans, around hooks."""

    def make(module: nn.Module, hooks: Hooks) -> Pipeline:
        assert plans.split is not None
        return Pipeline(
            module,
            plans.split,
            mesh.get_group(PIPELINE_AXIS),
            device=device,
            schedule=layout.schedule,
            num_microbatches=layout.num_microbatches,
            loss_scope=choices.loss_scope,
            hooks=hooks,
            ledger=ledger,
        )

    return make
