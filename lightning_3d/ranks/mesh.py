"""`Layout` to `DeviceMesh`: the only caller of `init_device_mesh`."""

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

from torch import distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_3d.layout import CONTEXT_AXIS, DATA_AXIS, EXPERT_AXIS, Coordinate, Layout

REPLICATE_AXIS, SHARD_AXIS = "data_replicate", "data_shard"
WITH_CONTEXT, SHARD_WITH_CONTEXT = "data_context", "data_shard_context"
"""Data and context ranks together: all of them, and those that share one sharded copy."""
EXPERT_REPLICAS = "expert_replicas"
"""Data and context ranks that own the same experts."""
DIVIDED_BY = {axis: {DATA_AXIS} for axis in (DATA_AXIS, SHARD_AXIS)} | {
    axis: {DATA_AXIS, CONTEXT_AXIS} for axis in (WITH_CONTEXT, SHARD_WITH_CONTEXT)
}
"""An axis of the mesh that ZeRO shards over -> the axes of the layout in it."""


def build_mesh(layout: Layout, device_type: str, timeout: timedelta) -> DeviceMesh:
    """The mesh of `layout` over the running process group. Every rank must call it.

    Its groups get `timeout`; torch's default is half an hour, also where the job's own group has another one.
    With hybrid shard the data axis is two axes, `data_replicate` (outer) and `data_shard`. `data_parallel` is their
    flattened view, so that everything but ZeRO uses the same names.
    """
    layout.check_world(dist.get_world_size())
    with new_groups_wait(timeout):
        return _axes(layout, device_type)


def new_groups_wait(timeout: timedelta) -> AbstractContextManager[Any]:
    """Give process groups created inside this `timeout`: a mesh takes none, so torch's defaults are replaced meanwhile.

    Private to torch, read in 2.13; the stopped pipeline rank of `tests/faults/test_peers_fail.py` fails without it.
    """
    names = ("default_pg_timeout", "default_pg_nccl_timeout")
    new: dict[str, Any] = {name: timeout for name in names if getattr(distributed_c10d, name) is not None}
    return patch.multiple(distributed_c10d, **new)


def _axes(layout: Layout, device_type: str) -> DeviceMesh:
    copies, sizes = layout.data_parallel_size // layout.shard_size, dict[str, int]()
    data = {DATA_AXIS: layout.data_parallel_size}
    if copies > 1:
        data = {REPLICATE_AXIS: copies, SHARD_AXIS: layout.shard_size}
    for axis, size in layout.sizes.items():
        sizes |= data if axis == DATA_AXIS else {axis: size}
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if copies > 1:
        mesh[tuple(data)]._flatten(DATA_AXIS)
    if CONTEXT_AXIS in sizes:
        together = (*data, CONTEXT_AXIS)
        mesh[together]._flatten(WITH_CONTEXT)
        if copies > 1:
            mesh[SHARD_AXIS, CONTEXT_AXIS]._flatten(SHARD_WITH_CONTEXT)
    return mesh


def _sharded(mesh: DeviceMesh) -> str:
    names = mesh.mesh_dim_names or ()
    if CONTEXT_AXIS in names:
        return SHARD_WITH_CONTEXT if SHARD_AXIS in names else WITH_CONTEXT
    return SHARD_AXIS if SHARD_AXIS in names else DATA_AXIS


def gradient_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The 1-D part of `mesh` over which gradients are averaged."""
    return mesh[WITH_CONTEXT if CONTEXT_AXIS in (mesh.mesh_dim_names or ()) else DATA_AXIS]


def shard_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The 1-D part of `mesh` that ZeRO shards over."""
    return mesh[_sharded(mesh)]


def expert_mesh(mesh: DeviceMesh, owners: int) -> DeviceMesh:
    """The data and context ranks as replicas of `owners` neighbours, who own different experts. Collective."""
    together = gradient_mesh(mesh)
    return together._unflatten(0, (together.size() // owners, owners), (EXPERT_REPLICAS, EXPERT_AXIS))


def expert_replicas(layout: Layout) -> int:
    """Data and context ranks that own the same experts."""
    return layout.gradient_ranks // layout.expert_parallel_size


def expert_place(layout: Layout, place: Coordinate) -> tuple[int, int]:
    """The index of a rank among those that own the same experts, and among the owners of different ones."""
    at = place.data * layout.context_parallel_size + place.get(CONTEXT_AXIS, 0)
    return divmod(at, layout.expert_parallel_size)


def copies_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The 2-D part of `mesh` with the copies and the shards of hybrid shard."""
    return mesh[REPLICATE_AXIS, _sharded(mesh)]
