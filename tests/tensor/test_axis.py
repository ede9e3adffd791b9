"""Collectives of the tensor axis: their results, and the passes over their data."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d.tensor.axis import GroupAxis
from tests.workers import run

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
    axis = GroupAxis(dist.group.WORLD)
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
    axis = GroupAxis(dist.group.WORLD)
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
