"""Collectives of the tensor axis: their results, and the passes over their data."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d.axes import ring_wire
from lightning_3d.axes.group import Group
from lightning_3d.tensor.axis import Axis, peer_group
from tests.workers import on_ranks, run

FREE = {"view", "_unsafe_view", "slice", "unbind", "new_empty"}
"""Operations that touch no data."""


class Passes(TorchDispatchMode):
    """Up to the message. What gloo does behind it is its own."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func.overloadpacket).partition(".")[2]
        if name not in FREE and not (self.found and self.found[-1].endswith("_base_")):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def _numbers(shape, rank):
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 100 * rank


def _gathered(shapes, turned):
    axis = Axis(Group(dist.group.WORLD))
    mine = _numbers(shapes[axis.rank], axis.rank)
    mine = mine.t().contiguous().t() if turned else mine
    with Passes() as passes:
        parts = axis.all_gather(mine, shapes)
    for rank, part in enumerate(parts):
        assert torch.equal(part, _numbers(shapes[rank], rank))
    return passes.found


@pytest.mark.parametrize(
    ("shapes", "turned", "first", "last"),
    [
        ([[4, 3], [4, 3]], False, [], []),
        ([[4, 3], [4, 3]], True, ["clone"], ["clone"]),
        ([[4, 3], [2, 3]], False, [], ["constant_pad_nd"]),
    ],
    ids=["even", "transposed", "uneven"],
)
def test_a_gather_sends_its_tensor_as_it_is(shapes, turned, first, last):
    passes = run(_gathered, shapes, turned, world=2, group=True)
    assert passes == [[*first, "_allgather_base_"], [*last, "_allgather_base_"]]


def _scattered(sizes, begins):
    axis = Axis(Group(dist.group.WORLD))
    whole = _numbers([4, sum(sizes), 3], axis.rank)
    shards = list(whole.split(sizes, dim=1))
    with Passes() as passes:
        result = axis.begin_reduce_scatter(shards)() if begins else axis.reduce_scatter(shards)
    total = _numbers([4, sum(sizes), 3], 0) + _numbers([4, sum(sizes), 3], 1)
    assert torch.equal(result, total.split(sizes, dim=1)[axis.rank])
    return passes.found


@pytest.mark.parametrize("begins", [False, True])
def test_shards_of_a_sum_are_copied_once(begins):
    for passes in run(_scattered, [2, 2], begins, world=2, group=True):
        assert passes == ["cat", "_reduce_scatter_base_"]
    for passes in run(_scattered, [3, 2], begins, world=2, group=True):
        assert "_reduce_scatter_base_" not in passes  # no backend divides a sum unevenly


@pytest.mark.parametrize("wire", [False, True])
@on_ranks(2)
def test_shards_of_images_whose_channels_come_last(wire):
    axis = Axis(peer_group(dist.group.WORLD, None, "cpu" if wire else "meta"))
    whole = _numbers([4, 2, 3, 5], axis.rank).contiguous(memory_format=torch.channels_last)
    total = _numbers([4, 2, 3, 5], 0) + _numbers([4, 2, 3, 5], 1)
    for found in (axis.reduce_scatter(list(whole.split(2))), axis.begin_reduce_scatter(list(whole.split(2)))()):
        assert torch.equal(found, total.split(2)[axis.rank])


def _through_memory(linked):
    machine = ring_wire._machine
    if not linked and dist.get_rank() == 1:
        ring_wire._machine = lambda: 0  # as if this rank were elsewhere
    try:
        with torch.inference_mode():  # validation may come before training
            axis = Axis(peer_group(dist.group.WORLD, None, "cpu"))
    finally:
        ring_wire._machine = machine
    mine = _numbers([5, 3], axis.rank)
    with torch.inference_mode(), Passes() as passes:
        axis.all_reduce(mine)
    total = axis.all_reduce(mine)
    rows = axis.all_gather(mine, [[5, 3], [5, 3]])
    shard = axis.reduce_scatter(list(_numbers([4, 3], axis.rank).split(2)))
    assert torch.equal(mine, _numbers([5, 3], axis.rank))
    return any(name == "allreduce_" for name in passes.found), total, rows, shard


@pytest.mark.parametrize("linked", [True, False])
def test_ranks_of_one_machine_sum_through_shared_memory(linked):
    whole, total = [_numbers([5, 3], rank) for rank in range(2)], _numbers([4, 3], 0) + _numbers([4, 3], 1)
    for rank, (gloo, summed, rows, shard) in enumerate(run(_through_memory, linked, world=2, group=True)):
        assert gloo is not linked
        assert torch.equal(summed, sum(whole))
        assert all(map(torch.equal, rows, whole))
        assert torch.equal(shard, total[2 * rank : 2 * rank + 2])


def _swapped(length):
    rank = dist.get_rank()
    sends, receives = ([3, length], [3, length + 7]) if rank == 0 else ([length + 7, 2], [length, 2])
    mine = torch.arange(sum(sends)).float() + 0.5 * rank
    by_library = Axis(Group(dist.group.WORLD)).all_to_all(mine, sends, receives)
    return torch.equal(Axis(peer_group(dist.group.WORLD, None, "cpu")).all_to_all(mine, sends, receives), by_library)


@pytest.mark.parametrize("length", [5, 5_000_000], ids=["short", "longer than all slots"])
def test_two_ranks_swap_uneven_parts_through_shared_memory(length):
    assert run(_swapped, length, world=2, group=True) == [True, True]
