"""`Axes`: the mesh and the process groups of one layout, used by one run at a time and reused by the next.

`fit`, `validate` and `test` of one Trainer are three runs. New groups for each would add up: torch frees none before
the job ends (DTensor caches every mesh), and with NCCL each takes device memory.

Links are groups of two neighbours of a pipeline. NCCL runs the messages of one group in the order in which they were
started: a rank's activations would wait for gradients of its neighbour. A group for each neighbour and direction lets
them pass each other. gloo needs none.
"""

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_3d.layout import CONTEXT_AXIS, DATA_AXIS, PIPELINE_AXIS, Coordinate, Layout
from lightning_3d.ranks import talk
from lightning_3d.ranks.dtensor_private import forget_meshes
from lightning_3d.ranks.mesh import (
    EXPERT_REPLICAS,
    build_mesh,
    expert_mesh,
    expert_replicas,
    gradient_mesh,
    new_groups_wait,
)
from lightning_3d.ranks.process_groups_private import freeze_garbage_in_forks, messages_of, timeout_of
from lightning_3d.ranks.users_group_private import UsersGroups

Links = Mapping[tuple[int, bool], dist.ProcessGroup]
"""(pipeline rank of the neighbour, True for gradients) -> a group of it and this rank."""

_links: weakref.WeakKeyDictionary[dist.ProcessGroup, Links] = weakref.WeakKeyDictionary()


def open_links(group: dist.ProcessGroup, device: torch.device) -> None:
    """Open and connect the links of this rank in its pipeline `group`. Every rank of the job must call it.

    All ranks open the same number of groups, because NCCL splits the communicator of the job on all ranks together. In
    a round without a neighbour a rank opens a group of itself alone.
    """
    if talk.takes_cpu_tensors(group) or group.size() == 1:
        return
    ranks, me, wait = dist.get_process_group_ranks(group), group.rank(), timeout_of(group)
    links: dict[tuple[int, bool], dist.ProcessGroup] = {}
    for pairs in rounds(group.size()):
        pair = next((pair for pair in pairs if me in pair), (me,))
        for backward in (False, True):
            link = dist.new_group([ranks[at] for at in pair], wait, use_local_synchronization=True)
            if len(pair) == 2:
                links[sum(pair) - me, backward] = link
                _connect(link, device)
    _links[group] = links


def links_of(group: dist.ProcessGroup) -> Links:
    """The links that `open_links` opened for `group`; none where messages of one group pass each other."""
    return _links.get(group, {})


def rounds(size: int) -> Sequence[Sequence[tuple[int, int]]]:
    """Pairs of neighbours in a ring of `size` ranks, in rounds in which no rank is in two pairs."""
    if size == 2:
        return [[(0, 1)]]
    even = [(at, at + 1) for at in range(0, size - 1, 2)]
    odd = [(at, at + 1) for at in range(1, size - 1, 2)]
    last = [(0, size - 1)]
    return [even, odd + last] if size % 2 == 0 else [even, odd, last]


def _connect(link: dist.ProcessGroup, device: torch.device) -> None:
    """Exchange a message both ways: the first one opens the connection, which takes long."""
    mine, peer = torch.zeros(1, device=device), 1 - link.rank()
    theirs = torch.empty_like(mine)
    both = [
        dist.P2POp(dist.isend, mine, group=link, group_peer=peer),
        dist.P2POp(dist.irecv, theirs, group=link, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()


@dataclass(frozen=True)
class Axes:
    """This rank's mesh, for the main thread, and groups for the thread that syncs gradients."""

    key: Hashable
    mesh: DeviceMesh
    data: dist.ProcessGroup
    """All data and context ranks, whose gradients are averaged."""
    shard: dist.ProcessGroup | None
    """Those that share one copy, None where all do."""
    replicate: dist.ProcessGroup | None
    """Data ranks that have the same shard of other copies."""
    users: UsersGroups | None
    """For the user's own messages, None where the data ranks are all ranks."""
    experts: DeviceMesh | None = None
    """The replicas of experts and the owners of different ones; None where each rank owns all."""
    expert_replicas: dist.ProcessGroup | None = None
    """The ranks that own the same experts, None where it is one."""

    @property
    def hosts(self) -> dist.ProcessGroup:
        """The ranks of `data`, for messages between their hosts in the main thread."""
        return talk.open_hosts(gradient_mesh(self.mesh).get_group())


class _Unused:
    """Axes that no run uses now, of the job's present process group."""

    world: weakref.ref[dist.ProcessGroup] | None = None
    axes: list[Axes] = []  # noqa: RUF012 (one for the process)
    alone: dist.ProcessGroup | None = None
    """This rank, for all runs."""


def _follow_world() -> None:
    """Forget groups of a job that has ended in this process."""
    world = dist.group.WORLD
    assert world is not None
    if _Unused.world is None or _Unused.world() is not world:
        _Unused.world, _Unused.axes, _Unused.alone = weakref.ref(world), [], None


def group_alone(rank: int) -> dist.ProcessGroup:
    """The group of this rank only. Every rank must call it: NCCL splits the communicator of the job."""
    _follow_world()
    if _Unused.alone is None:
        _Unused.alone = dist.new_group([rank], use_local_synchronization=True)
    assert _Unused.alone is not None
    return _Unused.alone


def open_groups(layout: Layout, rank: int, device_type: str, timeout: timedelta) -> Axes:
    """Axes of `layout` that no other run uses until `return_groups`. Every rank must call it."""
    _follow_world()
    key = (tuple(layout.sizes.items()), layout.expert_parallel_size, layout.zero_shard_size, rank, device_type, timeout)
    for axes in _Unused.axes:
        if axes.key == key:
            _Unused.axes.remove(axes)
            return axes
    return _open(key, layout, rank, device_type, timeout)


def return_groups(axes: Axes) -> None:
    """Keep `axes` for a later run. Call it on every rank, and only if all their collectives are finished."""
    if _Unused.world is not None and _Unused.world() is dist.group.WORLD:
        _Unused.axes.append(axes)


def groups_in_step(axes: Axes, position: Hashable) -> bool:
    """True where every rank has called the same collectives on `axes`, so that another run may use them. Collective.

    `position` is this rank's place in the run, None where a message may be under way. Equal positions stand for the
    pipeline's group, on which stages send different numbers of messages.
    """
    names = [name for name in axes.mesh.mesh_dim_names or () if name != PIPELINE_AXIS]
    groups: list[Any] = [axes.mesh.get_group(name) for name in names]  # one method is missing from torch's types
    users = axes.users.data if axes.users is not None else None
    groups += [axes.experts.get_group(name) for name in (axes.experts.mesh_dim_names or ())] if axes.experts else []
    others = (axes.data, axes.shard, axes.replicate, axes.expert_replicas, users)
    groups += [group for group in others if group is not None]
    counts = {(index, *dist.get_process_group_ranks(group)): messages_of(group) for index, group in enumerate(groups)}
    answers = talk.gather((position, counts))
    agreed: dict[tuple[int, ...], int] = {}
    return all(
        where is not None
        and where == position
        and all(agreed.setdefault(group, count) == count for group, count in begun.items())
        for where, begun in answers
    )


def _open(key: Hashable, layout: Layout, rank: int, device_type: str, timeout: timedelta) -> Axes:
    freeze_garbage_in_forks()
    forget_meshes(device_type)
    mesh = build_mesh(layout, device_type, timeout)
    for group in (dist.group.WORLD, *map(mesh.get_group, layout.sizes), gradient_mesh(mesh).get_group()):
        assert group is not None
        talk.open_hosts(group)
    open_links(mesh.get_group(PIPELINE_AXIS), torch.device(device_type))
    here, shard = layout.coordinate(rank), layout.shard_size
    data = _new_group(layout, here, timeout, lambda data: 0, layout.context_parallel_size)
    users = None
    if layout.data_parallel_size < layout.world_size:
        own = _new_group(layout, here, timeout, lambda data: 0)
        users = UsersGroups(own, own if layout.data_parallel_size == 1 else group_alone(rank))
    if shard == layout.data_parallel_size:
        return Axes(key, mesh, data, None, None, users, *_expert_groups(layout, mesh, timeout))
    return Axes(
        key,
        mesh,
        data,
        _new_group(layout, here, timeout, lambda data: data // shard, layout.context_parallel_size),
        _new_group(layout, here, timeout, lambda data: data % shard),
        users,
    )


def _expert_groups(
    layout: Layout, mesh: DeviceMesh, timeout: timedelta
) -> tuple[DeviceMesh | None, dist.ProcessGroup | None]:
    if layout.expert_parallel_size == 1:
        return None, None
    with new_groups_wait(timeout):
        experts = expert_mesh(mesh, layout.expert_parallel_size)
    if expert_replicas(layout) == 1:
        return experts, None
    ranks = dist.get_process_group_ranks(experts.get_group(EXPERT_REPLICAS))
    talk.open_hosts(experts.get_group(EXPERT_REPLICAS))
    return experts, dist.new_group(ranks, timeout, use_local_synchronization=True)


def _new_group(
    layout: Layout, here: Coordinate, timeout: timedelta, part: Callable[[int], int], context: int = 1
) -> dist.ProcessGroup:
    """This rank's group: the data ranks with its `part` and its place on the other axes, `context` ranks of each.

    All ranks open their groups at the same time. NCCL splits the communicator of the job once for all of them.
    """
    data = [each for each in range(layout.data_parallel_size) if part(each) == part(here.data)]
    places = [{DATA_AXIS: each} for each in data]
    if context > 1:
        places = [{**place, CONTEXT_AXIS: each} for place in places for each in range(context)]
    ranks = [layout.rank({**here, **place}) for place in places]
    return dist.new_group(ranks, timeout, use_local_synchronization=True)
