"""ZeRO: what the data axis shards, as a table of knobs on FSDP2. `apply_data` chooses by the stage."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.layout import Layout
from lightning_3d.module.anatomy import Anatomy
from lightning_3d.module.undo import UndoStack
from lightning_3d.sandbox.deferred import realize
from lightning_3d.zero.data_axis import DataAxis
from lightning_3d.zero.data_parallel import DataParallel as DataParallel
from lightning_3d.zero.data_parallel import OwnExperts as OwnExperts
from lightning_3d.zero.data_parallel import ReplicatedData as ReplicatedData
from lightning_3d.zero.shard_units import refuse_layer_drop, refuse_limited
from lightning_3d.zero.sharded import ShardedData as ShardedData
from lightning_3d.zero.shards_on_disk import ShardsOnDisk


def apply_data(
    module: nn.Module,
    anatomy: Anatomy,
    layout: Layout,
    mesh: DeviceMesh,
    data_axis: DataAxis,
    undo: UndoStack,
    *,
    training: bool,
    half: torch.dtype | None = None,
    disk: ShardsOnDisk | None = None,
    experts: OwnExperts | None = None,
) -> DataParallel:
    """Shard `module` over the data ranks, or keep its copies equal.

    Without `training` there are no optimizer states or gradients, and only ZeRO stage 3 shards anything. Only the
    replicas of this rank's `experts` share their gradients.
    """
    experts = experts or OwnExperts()
    if layout.gradient_ranks > 1:
        refuse_limited(module)
    if layout.shards_data and (training or layout.zero_stage == 3):
        if training:
            refuse_layer_drop(module)
        return ShardedData(module, anatomy, layout, mesh, data_axis, half=half, disk=disk, experts=experts, undo=undo)
    realize(module.parameters())
    if layout.gradient_ranks == 1 or not training:
        return DataParallel()
    apart = set(experts.parameters)
    here = [parameter for parameter in module.parameters() if not parameter.is_meta and parameter not in apart]
    return ReplicatedData(data_axis.replicas(here), undo, data_axis.expert_replicas(experts.parameters))
