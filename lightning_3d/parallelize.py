"""The parallelisms of one module, applied in one order.

`parallel.parallel_plan.make_plan` decides on the unsplit module. `parallelize` applies the plan in place, and
`ParallelModule.undo` reverts it.

[Note: order] stages -> proof -> tensor -> experts -> context -> activations -> disk -> data -> heads.
Stages come first, so that no rank shards a weight that it is about to drop. They are compared with the uncut module
at once, while blocks give the numbers of one device: dropout on shards gives others. Tensor comes before data, so that
FSDP2 shards what a tensor rank owns. Heads that wait for their loss come last, without those that are split by then.
Layers around one forward have the order of `module.forward.Layer`, whatever step adds them first.
A new parallelism is a folder, an entry in `axes` of the table of parameters, and one step here.
"""

from functools import partial

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.activations.recompute_blocks import offload_activations, one_block_at_a_time, recompute_blocks
from lightning_3d.axes.parameters import Parameters
from lightning_3d.context.cut_block import apply_context
from lightning_3d.experts.expert_forward import apply_experts
from lightning_3d.layout import CONTEXT_AXIS, EXPERT_AXIS, HALVED_BACKWARD, PIPELINE_AXIS, TENSOR_AXIS, Layout
from lightning_3d.module.host_memory import own_pages
from lightning_3d.offload.disk_tensors import DiskTransfers
from lightning_3d.parallel.parallel_module import ParallelModule
from lightning_3d.parallel.parallel_plan import ParallelPlan
from lightning_3d.pipeline.across_samples import LeftOut
from lightning_3d.pipeline.cut_module import StepCallbacks
from lightning_3d.pipeline.pipeline import Pipeline, apply_stages, prove_stages
from lightning_3d.pipeline.split import PipelineSplit
from lightning_3d.precision import Precision3D
from lightning_3d.sandbox.deferred import empty
from lightning_3d.sandbox.without_values import REPLACED
from lightning_3d.tensor.apply import apply_tensor
from lightning_3d.tensor.late_head import patch_heads
from lightning_3d.tensor.late_tensor import pass_late
from lightning_3d.zero import ShardedData, apply_data
from lightning_3d.zero.data_axis import DataAxis
from lightning_3d.zero.shards_on_disk import ShardsOnDisk


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

    `parallel` notes what is applied, so that `undo` works after an error in here too. Without `training` there are no
    optimizer states or gradients, and only ZeRO stage 3 shards anything.
    """
    module, undo = parallel.module, parallel.changes
    table = parallel.parameters = Parameters(module)
    if plan.split is not None:
        group = mesh.get_group(PIPELINE_AXIS)
        before = {name: held.before for held in table for name in held.names}
        parallel.stages = apply_stages(module, plan.split, layout, group, device, undo, before)
        table.find_registered()
        for absent in table.swaps():
            empty(absent)  # freed, but not dropped: optimizers find their parameters by the old object
        parallel.pipeline = _proven_pipeline(parallel, plan, plan.split, layout, group, plugin, device, data_axis)
    if plan.tensor is not None and plan.tensor.splits:
        parallel.tensor = apply_tensor(module, plan.tensor, mesh[TENSOR_AXIS], undo, ledger=data_axis.ledger)
    owners = data_axis.axes.experts
    if training and plan.experts is not None and owners is not None:
        parallel.experts = apply_experts(module, plan.experts, owners[EXPERT_AXIS], undo, data_axis.ledger)
    if training and plan.context is not None:
        travel = plan.experts is not None
        parts = apply_context(module, plan.context, mesh[CONTEXT_AXIS], undo, data_axis.ledger, experts=travel)
        if parallel.pipeline is not None:
            parallel.pipeline.wire.parts = parts
    if training:
        parallel.recomputed = recompute_blocks(module, plan.anatomy.blocks, plan.recompute, undo)
    if training and plan.offload.activations is not None:
        offload_activations(module, plan.anatomy, undo)
    disk = _reserve_disk(parallel, plan, layout)
    parallel.data = apply_data(
        module, plan.anatomy, layout, mesh, data_axis, undo, training=training, half=plugin.half_dtype(), disk=disk,
        experts=None if parallel.experts is None else parallel.experts.own,
    )  # fmt: skip
    if training:
        patch_heads(module, plan.anatomy.blocks, undo)
    if parallel.tensor is not None or plan.context is not None:
        sharded = parallel.data if isinstance(parallel.data, ShardedData) else None
        for unit in (*sharded.blocks, *sharded.apart) if sharded is not None else ():
            undo.callback(unit.register_forward_pre_hook(pass_late, prepend=True, with_kwargs=True).remove)
    _locate(parallel)


def _locate(parallel: ParallelModule) -> None:
    table = parallel.parameters
    sharded = parallel.data if isinstance(parallel.data, ShardedData) else None
    table.find_registered()
    splitting = [axis for axis in (parallel.tensor, parallel.experts) if axis is not None]
    table.axes = [*splitting, parallel.data]
    for held in table:
        held.split = next((split for axis in splitting if (split := axis.split_of(held)) is not None), None)
        if sharded is not None:
            held.rows = sharded.rows.get(held.now)
            held.disk = None if sharded.disk is None else sharded.disk.of.get(held.now)
    if parallel.stages is not None:
        parallel.stages.locate(table)
    for held in table:
        if held.now is not held.before and type(held.before) is nn.Parameter:
            parallel.changes.set(held.before, "lightning_3d_name", held.names[0])
            held.before.data = held.before.data.new_empty(()).expand(held.now.shape)  # code may ask for the shape
            REPLACED.hide(held.before)
            parallel.changes.callback(partial(REPLACED.show, held.before))


def _proven_pipeline(
    parallel: ParallelModule,
    plan: ParallelPlan,
    split: PipelineSplit,
    layout: Layout,
    group: dist.ProcessGroup,
    plugin: Precision3D,
    device: torch.device,
    data_axis: DataAxis,
) -> Pipeline:
    """The pipeline of a module that is cut, after a comparison with the uncut one where that has run."""
    pipeline = Pipeline(
        parallel.module,
        split,
        group,
        device=device,
        schedule=layout.schedule,
        num_microbatches=layout.num_microbatches,
        loss_scope=plan.scope.value,
        is_mean=plan.scope.is_mean,
        mixing=plan.scope.mixing,
        left_out=LeftOut(plan.scope.left_out),
        alike=() if plan.uncut_run is None else plan.uncut_run.loss_mean.alike,
        ledger=data_axis.ledger,
    )
    if plan.uncut_run is not None and plan.uncut_run.compared:
        blocks = [unit.name for unit in split.units]
        with one_block_at_a_time(parallel.module, blocks, plugin.forward_context) as context:
            prove_stages(pipeline, plan.uncut_run, StepCallbacks(context=context))
    if plan.tensor is not None or plan.context is not None or layout.schedule in HALVED_BACKWARD:
        pipeline.forget()  # shards draw other numbers; hooks of FSDP2 and recompute may run twice in two halves
    pipeline.together = data_axis.axes.hosts if plan.experts is not None else None
    return pipeline


def _reserve_disk(parallel: ParallelModule, plan: ParallelPlan, layout: Layout) -> ShardsOnDisk | None:
    """Prepare the transfers of what is on a disk, and room for parameters there. Collective; raises on every rank."""
    if not plan.offload.on_disk:
        return None
    parallel.disk = DiskTransfers(plan.offload.budget)
    parallel.changes.enter_context(own_pages())  # else freed pages stay with the process (half as much memory again)
    place = plan.offload.parameters
    if place is None or place.folder is None:
        return None
    return ShardsOnDisk.reserve(parallel.disk, place.folder, parallel.module, layout)
