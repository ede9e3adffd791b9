"""The parallelisms of one module: planned on the unsplit module, then applied to it in one order.

`make_plan` decides, equally on every rank. `parallelize` applies the plan in place; `ParallelModule.undo` reverts it.

[Note: order] stages -> proof -> tensor -> recompute -> data.
Stages come first, so that no rank shards a weight that it is about to drop. They are compared with the unsplit module
at once, while blocks give the numbers of one device: dropout on shards gives others. Tensor comes before data, so that
FSDP2 shards what a tensor rank owns. Recompute is between them: a block is computed again in shards, and gathered once
for that and its backward.
A new parallelism is a new folder and one more line in `parallelize`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_3d.activations.recompute_blocks import RecomputedBlocks, recompute_blocks
from lightning_3d.activations.recompute_choice import KEEP_ALL, Recompute
from lightning_3d.data.same_batch import compare_first_batch
from lightning_3d.errors import ConfigurationError, PipelineSplitError, RunError
from lightning_3d.layout import HALVED_BACKWARD, PIPELINE_AXIS, TENSOR_AXIS, Layout
from lightning_3d.module.anatomy import Anatomy
from lightning_3d.module.state_dict import full_optimizer_entries, swap_parameters
from lightning_3d.module.undo import UndoStack
from lightning_3d.pipeline.context import Hooks
from lightning_3d.pipeline.exchange import Stages
from lightning_3d.pipeline.loss_scope import MICROBATCH, ChosenScope, LossScope, choose_scope
from lightning_3d.pipeline.observe import UncutRun, observe_one_batch
from lightning_3d.pipeline.pipeline import Pipeline
from lightning_3d.pipeline.schedule import stage_ranks, stages_per_rank
from lightning_3d.pipeline.split import PipelineSplit, apply_split, plan_split
from lightning_3d.precision import Precision3D
from lightning_3d.ranks import talk
from lightning_3d.ranks.mesh import shard_mesh
from lightning_3d.sandbox.deferred import computed_on_use, empty, realize
from lightning_3d.tensor.apply import AppliedTensor, apply_tensor, full_tensor, shard_of
from lightning_3d.tensor.block_calls import record_one_batch, records
from lightning_3d.tensor.geometry import TensorSplit
from lightning_3d.tensor.late_gather import pass_late_gather
from lightning_3d.tensor.plan_module import SEQUENCE, plan_tensor
from lightning_3d.tensor.tensor_plan import TensorPlan
from lightning_3d.zero import DataParallel, ReplicatedData, ShardedData
from lightning_3d.zero.data_axis import DataAxis


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

    def __post_init__(self) -> None:
        if self.loss_scope not in (scopes := get_args(LossScope)):
            raise ConfigurationError(f"loss_scope={self.loss_scope!r} is none of {', '.join(map(repr, scopes))}.")


@dataclass(frozen=True)
class ParallelPlan:
    """Everything that is going to be done to a module. Decided on the unsplit module, equal on every rank."""

    anatomy: Anatomy
    split: PipelineSplit | None = None
    tensor: TensorPlan | None = None
    uncut_run: UncutRun | None = None
    """One microbatch, run by the module before it is cut."""
    scope: ChosenScope = MICROBATCH
    recompute: Recompute = KEEP_ALL


def make_plan(
    trainer: Trainer,
    module: LightningModule,
    layout: Layout,
    choices: UserChoices,
    to_device: Callable[[Any], Any],
    plugin: Precision3D,
) -> ParallelPlan:
    """Decide on the unsplit module what will be done to it, the same on every rank. Collective."""
    anatomy = Anatomy.of(module)
    split = plan_pipeline(module, anatomy, layout, None)
    uncut_run = None
    cut = split is not None and not split.solo
    if cut or (layout.tensor_parallel_size > 1 and records(module)):  # a batch is read ahead of training
        compare_first_batch(trainer, layout)
    if split is not None and cut:
        units = [unit.name for unit in split.units]
        _ = trainer.log_dir  # a broadcast, made now on all ranks: a pipelined step may read it on one rank
        with computed_on_use(module):
            uncut_run = observe_one_batch(
                trainer, module, units, layout, to_device, plugin.forward_context, choices.loss_scope
            )
    split = plan_pipeline(module, anatomy, layout, choices.pipeline_split, uncut_run)
    tensor = None
    if layout.tensor_parallel_size > 1:
        with computed_on_use(module):
            calls = record_one_batch(trainer, module, to_device)
        tensor = talk.from_first(
            lambda: plan_tensor(
                module,
                layout.tensor_parallel_size,
                tensor_plan=choices.tensor_plan,
                sequence_parallel=layout.sequence_parallel,
                calls=calls,
            )
        )
        tensor = keep_within_stages(tensor, split)
    scope = MICROBATCH
    if split is not None and not split.solo and trainer.state.fn == TrainerFn.FITTING:
        scope = choose_scope(choices.loss_scope, uncut_run, layout)
    return ParallelPlan(anatomy, split, tensor, uncut_run, scope, choices.recompute)


def plan_pipeline(
    module: nn.Module, anatomy: Anatomy, layout: Layout, cuts: Sequence[str] | None, uncut_run: UncutRun | None = None
) -> PipelineSplit | None:
    """The cut of `module` into stages, None with one pipeline rank."""
    if layout.pipeline_parallel_size == 1:
        return None
    per_rank = stages_per_rank(layout.schedule, layout.stages_per_rank)
    return plan_split(module, anatomy, layout.pipeline_parallel_size * per_rank, cuts=cuts, uncut=uncut_run)


def keep_within_stages(tensor: TensorPlan, split: PipelineSplit | None) -> TensorPlan:
    """`tensor` without the blocks that `split` cuts through: a weight that tensor ranks shard must stay on one stage.

    Where the pipeline cuts between children of a block, the output of each child must be full, also on ranks where the
    block itself is on another stage and gathers nothing. There the sequence is not sharded.
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


@dataclass
class ParallelModule:
    """A module and the parallelisms that were applied to it."""

    module: nn.Module
    data: DataParallel = field(default_factory=DataParallel)
    tensor: AppliedTensor | None = None
    recomputed: RecomputedBlocks | None = None
    stages: Stages | None = None
    pipeline: Pipeline | None = None
    """Runs the stages, once it is opened; None without stages."""
    originals: Mapping[str, nn.Parameter] = field(default_factory=dict)
    changes: UndoStack = field(default_factory=UndoStack)
    """Undoes the parallelisms, and what else is put on the module until then."""
    fitted: UndoStack = field(default_factory=UndoStack)
    """Undoes what the last fit has put on its optimizers."""
    splits: Mapping[nn.Parameter, TensorSplit] = field(default_factory=dict)

    @property
    def swaps(self) -> dict[nn.Parameter, nn.Parameter]:
        """Parameter registered before -> parameter registered now, for those that were replaced."""
        now = dict(self.module.named_parameters())
        return {old: now[name] for name, old in self.originals.items() if now[name] is not old}

    def gather_full(self, parameter: nn.Parameter, shard: Tensor) -> Tensor:
        """The full tensor of `shard`, which is sharded like `parameter`. Collective over the data and tensor axes."""
        shard = self.data.gather_full(parameter, shard)
        split = self.splits.get(parameter)
        return full_tensor(shard, split) if split is not None else shard

    def take_shard(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """This rank's shard of `full`, sharded like `parameter`."""
        if parameter.is_meta:
            return torch.empty_like(full, device="meta")
        split = self.splits.get(parameter)
        if split is not None and self.tensor is not None:
            full = shard_of(full.to(parameter.device), split, self.tensor.mesh)
        return self.data.take_shard(parameter, full)

    def counts(self, parameter: nn.Parameter) -> bool:
        """True where this rank's stage is the one that counts a parameter which several stages have."""
        return self.stages is None or self.stages.counts(parameter)

    def abandon(self) -> None:
        """Remove hooks and patches once other ranks do not answer any more. The parameters stay sharded."""
        self.fitted.abandon()
        self.changes.abandon()

    def rest(self) -> None:
        """End a run after which the module stays in shards."""
        self.data.reshard()
        for parameter in self.module.parameters():
            parameter.grad = None

    @torch.no_grad()
    def undo(self, optimizers: Sequence[Optimizer]) -> None:
        """Make the module plain and unsplit again, and give `optimizers` its parameters and full states. Collective."""
        self.fitted.close()
        if type(self.data) is DataParallel and self.tensor is None and self.stages is None:
            self.changes.close()
            return
        self.data.reshard()
        entries = [full_optimizer_entries(optimizer, self.gather_full, self.stages) for optimizer in optimizers]
        before = dict(self.module.named_parameters(remove_duplicate=False))
        self.changes.close()
        after = dict(self.module.named_parameters(remove_duplicate=False))
        # an evaluation replaces parameters too, and the optimizers of the `fit` before it have the originals
        swaps = {old: after[name] for name, old in self.originals.items()}
        swap_parameters(optimizers, swaps | {before[name]: after[name] for name in before}, entries)


def parallelize(
    parallel: ParallelModule,
    plan: ParallelPlan,
    layout: Layout,
    mesh: DeviceMesh,
    data_axis: DataAxis,
    plugin: Precision3D,
    device: torch.device,
    *,
    training: bool,
) -> None:
    """Apply `plan` to `parallel.module` in place. Every rank calls it, with equal weights. See [Note: order].

    Args:
        parallel: notes what is applied, so that `undo` works after an error in here too.
        device: holds the activations.
        training: False where there are no optimizer states or gradients, so that only ZeRO stage 3 shards anything.
    """
    module, undo = parallel.module, parallel.changes
    parallel.originals = dict(module.named_parameters())
    if plan.split is not None:
        group = mesh.get_group(PIPELINE_AXIS)
        _apply_stages(parallel, plan.split, layout, group, device)
        parallel.pipeline = pipeline = Pipeline(
            module,
            plan.split,
            group,
            device=device,
            schedule=layout.schedule,
            num_microbatches=layout.num_microbatches,
            loss_scope=plan.scope.value,
            ledger=data_axis.ledger,
        )
        if plan.uncut_run is not None and plan.uncut_run.compared:
            with computed_on_use(module):
                prove_stages(pipeline, plan.uncut_run, Hooks(context=plugin.forward_context))
        if plan.tensor is not None or layout.schedule in HALVED_BACKWARD:
            pipeline.forget()  # shards draw other numbers; hooks of FSDP2 and recompute may run twice in two halves
    if plan.tensor is not None and plan.tensor.splits:
        parallel.tensor = apply_tensor(module, plan.tensor, mesh[TENSOR_AXIS], undo, ledger=data_axis.ledger)
    if training:
        parallel.recomputed = recompute_blocks(module, plan.anatomy, plan.recompute, undo)
    parallel.data = _apply_data(module, plan, layout, mesh, data_axis, plugin.half_dtype(), training, undo)
    parallel.splits = _splits_of(module, parallel.tensor)
    if parallel.tensor is not None and isinstance(parallel.data, ShardedData):
        for block in parallel.data.blocks:
            undo.callback(block.register_forward_pre_hook(pass_late_gather, prepend=True, with_kwargs=True).remove)
    if parallel.stages is not None:
        parallel.stages.locate_parameters(module)


def prove_stages(pipeline: Pipeline, uncut_run: UncutRun, hooks: Hooks) -> None:
    """Compare one microbatch with what the uncut module computed. Collective; raises on every rank."""
    try:
        with UndoStack() as undo:
            pipeline.open(hooks, undo)
            talk.together(lambda: pipeline.prove(uncut_run), ConfigurationError)
    except (ConfigurationError, RunError):
        raise
    except Exception as error:  # raised here at once: other ranks may wait for this one within the step
        failed = f"Cut into stages, the step fails, but uncut it does not ({type(error).__name__}: {error})."
        if _differentiates(error):
            raise PipelineSplitError(
                f"{failed} It takes derivatives by itself (torch.autograd.grad: a gradient penalty, a physics loss, an"
                " adversarial input), through blocks of other stages, which no single rank can. Use"
                " pipeline_parallel_size=1; tensor, ZeRO and data parallelism can do this."
            ) from error
        raise PipelineSplitError(
            f"{failed} Does its code read from a block of another stage what only the rank of that stage has (a tensor"
            " kept on a module)? Pass it from block to block, or keep both on one stage with pipeline_split."
        ) from error


def _differentiates(error: Exception) -> bool:
    """True for torch's errors about `autograd.grad`: while stages are compared nothing else calls it."""
    return any(text in str(error) for text in ("differentiated Tensor", "does not require grad"))


def _apply_stages(
    parallel: ParallelModule, split: PipelineSplit, layout: Layout, group: dist.ProcessGroup, device: torch.device
) -> None:
    """Keep the stages of this rank. Parameters of other stages are replaced by meta tensors."""
    ranks = stage_ranks(layout.schedule, group.size(), split.num_stages // group.size())
    mine = [stage for stage, rank in enumerate(ranks) if rank == group.rank()]
    parallel.changes.collective(apply_split(parallel.module, split, mine).undo, group, ranks)
    parallel.stages = Stages(split, group, ranks, device)
    for old in parallel.swaps:
        empty(old)  # freed, but not dropped: optimizers find their parameters by the old object


def _apply_data(
    module: nn.Module,
    plan: ParallelPlan,
    layout: Layout,
    mesh: DeviceMesh,
    data_axis: DataAxis,
    half: torch.dtype | None,
    training: bool,
    undo: UndoStack,
) -> DataParallel:
    several = layout.data_parallel_size > 1
    sharded = several and (layout.zero_stage == 3 or (training and layout.zero_stage > 0))
    if not sharded:
        realize(module.parameters())
        if not (several and training):
            return DataParallel()
        here = [parameter for parameter in module.parameters() if not parameter.is_meta]
        return ReplicatedData(data_axis.replicas(here), undo)
    return ShardedData(
        module,
        plan.anatomy,
        stage=layout.zero_stage,
        mesh=shard_mesh(mesh),
        half=half,
        offload=layout.offload == "all",
        pipelined=plan.split is not None,
        attach=data_axis.attach,
        replicate=data_axis.replicas,
        undo=undo,
    )


def _splits_of(module: nn.Module, tensor: AppliedTensor | None) -> dict[nn.Parameter, TensorSplit]:
    if tensor is None:
        return {}
    named = dict(module.named_parameters(remove_duplicate=False))
    return {named[name]: split for name, split in tensor.splits.items() if not named[name].is_meta}
