"""`Axes`: the mesh and the process groups of one layout, lent to one run at a time and kept for the next.

`fit`, `validate` and `test` of one Trainer are three runs. Groups made anew for each would add up: torch frees none
before the job ends (DTensor remembers every mesh), and on NCCL each takes memory of the device.
"""

import gc
import os
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.layout import PIPELINE_AXIS, Coordinate, Layout
from lightning_3d.ranks import talk
from lightning_3d.ranks.mesh import build_mesh


@dataclass(frozen=True)
class Axes:
    """This rank's mesh, for the main thread, and groups of its data axis, for the thread that syncs gradients."""

    key: Hashable
    mesh: DeviceMesh
    whole: dist.ProcessGroup
    """All data ranks."""
    shard: dist.ProcessGroup | None
    """Those that share one copy, None where all do."""
    replicate: dist.ProcessGroup | None
    """Those that hold the same shard of other copies."""


class _KeptGroups:
    """What nobody uses now, of the job's present process group."""

    world: weakref.ref[dist.ProcessGroup] | None = None
    axes: list[Axes] = []  # noqa: RUF012 (one for the process)


def open_groups(layout: Layout, rank: int, device_type: str, timeout: timedelta) -> Axes:
    """Axes of `layout` that nothing else uses until they are given back. Every rank must call it."""
    world = dist.group.WORLD
    assert world is not None
    if _KeptGroups.world is None or _KeptGroups.world() is not world:
        _KeptGroups.world, _KeptGroups.axes = weakref.ref(world), []
    key = (layout.shape, layout.zero_shard_size, rank, device_type, timeout)
    for axes in _KeptGroups.axes:
        if axes.key == key:
            _KeptGroups.axes.remove(axes)
            return axes
    return _open(key, layout, rank, device_type, timeout)


def return_groups(axes: Axes) -> None:
    """Keep `axes` for a later run: on every rank, and only where no collective of theirs is unfinished."""
    if _KeptGroups.world is not None and _KeptGroups.world() is dist.group.WORLD:
        _KeptGroups.axes.append(axes)


def in_step(axes: Axes, moment: Hashable) -> bool:
    """Whether every rank has done the same on `axes`, so that another run may use them. Collective over the world.

    Args:
        moment: where in the run this rank is, None if something that it began has not ended. Equal moments stand for
            the pipeline's group, on which stages send different numbers of messages.
    """
    names = [name for name in axes.mesh.mesh_dim_names or () if name != PIPELINE_AXIS]
    groups: list[Any] = [axes.mesh.get_group(name) for name in names]  # one method is missing from torch's types
    groups += [group for group in (axes.whole, axes.shard, axes.replicate) if group is not None]
    counts = {
        (index, *dist.get_process_group_ranks(group)): group._get_sequence_number_for_group()
        for index, group in enumerate(groups)
    }
    answers = talk.gather((moment, counts))
    agreed: dict[tuple[int, ...], int] = {}
    return all(
        where is not None
        and where == moment
        and all(agreed.setdefault(group, count) == count for group, count in begun.items())
        for where, begun in answers
    )


def _open(key: Hashable, layout: Layout, rank: int, device_type: str, timeout: timedelta) -> Axes:
    _leave_garbage_to_the_parent()
    mesh = build_mesh(layout, device_type, timeout)
    here, shard = layout.coordinate(rank), layout.zero_shard_size or layout.data_parallel_size
    whole = _new_group(layout, here, timeout, lambda data: 0)
    if shard == layout.data_parallel_size:
        return Axes(key, mesh, whole, None, None)
    return Axes(
        key,
        mesh,
        whole,
        _new_group(layout, here, timeout, lambda data: data // shard),
        _new_group(layout, here, timeout, lambda data: data % shard),
    )


@cache
def _leave_garbage_to_the_parent() -> None:
    """Forked processes, such as the workers of a dataloader, never collect what was garbage when they began.

    With a finished run among it (groups, mesh and DTensor refer to each other) a worker would end the run's process
    groups, and wait forever for their threads: a fork has none but its own.
    """
    os.register_at_fork(after_in_child=gc.freeze)


def _new_group(layout: Layout, here: Coordinate, timeout: timedelta, part: Callable[[int], int]) -> dist.ProcessGroup:
    """This rank's group of data ranks with the same `part`, one for each pipeline and tensor coordinate."""
    mine = None
    for pipeline in range(layout.pipeline_parallel_size):
        for tensor in range(layout.tensor_parallel_size):
            parts: dict[int, list[int]] = {}
            for data in range(layout.data_parallel_size):
                rank = layout.rank(Coordinate(pipeline=pipeline, data=data, tensor=tensor))
                parts.setdefault(part(data), []).append(rank)
            for key, ranks in parts.items():
                group = dist.new_group(ranks, timeout=timeout)
                if (here.pipeline, here.tensor, part(here.data)) == (pipeline, tensor, key):
                    mine = group
    assert mine is not None
    return mine


def has_peers() -> bool:
    """Return False on the simulated rank of a dry run: no other process answers, and its tensors have no values.

    Code that compares values, or waits for other ranks, asks this first.
    """
    return not (dist.is_initialized() and dist.get_backend() == "fake")
