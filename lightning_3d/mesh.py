"""`Layout` to `DeviceMesh`: the only caller of `init_device_mesh`."""

from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_3d.layout import AXES, DATA_AXIS, PIPELINE_AXIS, TENSOR_AXIS, Layout

REPLICATE_AXIS, SHARD_AXIS = "data_replicate", "data_shard"


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The mesh of `layout` over the running process group. Every rank must call it.

    With hybrid shard the data axis is two axes, `data_replicate` (outer) and `data_shard`, and `data_parallel` is their
    flattened view, so that everything but ZeRO sees the same three names.
    """
    layout.check_world(dist.get_world_size())
    shard = layout.zero_shard_size
    if shard is None or shard == layout.data_parallel_size:
        return init_device_mesh(device_type, layout.shape, mesh_dim_names=AXES)
    mesh = init_device_mesh(
        device_type,
        (layout.pipeline_parallel_size, layout.data_parallel_size // shard, shard, layout.tensor_parallel_size),
        mesh_dim_names=(PIPELINE_AXIS, REPLICATE_AXIS, SHARD_AXIS, TENSOR_AXIS),
    )
    mesh[REPLICATE_AXIS, SHARD_AXIS]._flatten(DATA_AXIS)
    return mesh


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The 1-D part of `mesh` that ZeRO shards over."""
    names = mesh.mesh_dim_names or ()
    return mesh[SHARD_AXIS] if SHARD_AXIS in names else mesh[DATA_AXIS]
