"""The ring through shared memory: agreed on by all ranks, never waited for in vain, and nothing of it stays behind.

It also works with builds of Python that lack parts of the operating system.
"""

import os
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_3d.axes import ring_wire
from lightning_3d.axes.ring import ring_all_reduce
from lightning_3d.axes.ring_wire import RingWire
from lightning_3d.errors import PeerError
from tests.workers import on_ranks, run

LONG = 3 << 20
"""Numbers: a chunk of two ranks is two segments of the longest kind, so slots are used again."""


def _descriptors():
    return len(os.listdir("/proc/self/fd"))


@on_ranks(2)
def test_nothing_stays_behind():
    group = dist.new_group()
    dist.barrier(group)
    before = _descriptors()
    wire = RingWire(group)
    for _ in range(3):
        buffer = torch.full((LONG,), dist.get_rank() + 1.0)
        ring_all_reduce(buffer, wire)
        assert buffer.eq(3).all()
    assert wire._shared is not None
    assert _descriptors() == before + 6  # to either side memory, a pipe forth and one back
    del wire
    assert _descriptors() == before
    dist.barrier(group)


@pytest.mark.parametrize(("name", "answer"), [("_offer", [-1] * 5), ("_take", ()), ("_machine", 5), ("_machine", 0)])
@on_ranks(3)
def test_where_one_rank_cannot_all_send_through_the_group(name, answer):
    group = dist.new_group()
    dist.barrier(group)
    before, whole = _descriptors(), getattr(ring_wire, name)
    if dist.get_rank() == 1:
        setattr(ring_wire, name, lambda *_: answer)
    try:
        wire = RingWire(group)
        buffer = torch.full((7,), dist.get_rank() + 1.0)
        ring_all_reduce(buffer, wire)
    finally:
        setattr(ring_wire, name, whole)
    assert wire._shared is None
    assert buffer.eq(6).all()
    assert _descriptors() == before
    dist.barrier(group)


@on_ranks(2)
def test_a_neighbour_that_leaves_is_noticed_at_once():
    group = dist.new_group()
    wire = RingWire(group)
    ring_all_reduce(torch.ones(4), wire)
    dist.barrier(group)
    if dist.get_rank() == 1:
        del wire
        return
    start = time.monotonic()
    with pytest.raises(PeerError, match="its process ended"):
        ring_all_reduce(torch.ones(8 * LONG), wire)
    assert time.monotonic() - start < 5


@on_ranks(2)
def test_what_a_neighbour_sent_before_it_left_arrives():
    group = dist.new_group()
    wire = RingWire(group)
    ring_all_reduce(torch.ones(4), wire)
    rank = dist.get_rank()
    if rank == 0:  # it sends nothing that anybody waits for any more, but has not taken what was sent to it
        time.sleep(0.5)
    buffer = torch.full((4,), rank + 1.0)
    ring_all_reduce(buffer, wire)
    assert buffer.eq(3).all()
    if rank == 1:
        del wire


@on_ranks(2)
def test_a_silent_neighbour_is_waited_for_no_longer_than_the_timeout():
    group = dist.new_group(timeout=timedelta(seconds=1))
    wire = RingWire(group)
    ring_all_reduce(torch.ones(4), wire)
    if dist.get_rank() == 0:
        with pytest.raises(PeerError, match="within the timeout of 1 s"):
            ring_all_reduce(torch.ones(4), wire)
    dist.barrier()


@on_ranks(2)
def test_different_lengths_are_refused():
    wire = RingWire(dist.new_group())
    ring_all_reduce(torch.ones(4), wire)
    with pytest.raises(PeerError, match=r"sends (8|16) bytes where (16|8) are expected"):
        ring_all_reduce(torch.ones(4 + 4 * dist.get_rank()), wire)
    dist.barrier()


def _linked(full):
    with mock.patch.object(os, "memfd_create", create=True):
        del os.memfd_create
        if full:
            with mock.patch.object(os, "posix_fallocate", side_effect=OSError("No space left on device")):
                before = len(os.listdir("/proc/self/fd"))
                linked = ring_wire.connect(dist.group.WORLD, 64)
                return linked is None, len(os.listdir("/proc/self/fd")) - before
        linked = ring_wire.connect(dist.group.WORLD, 64)
    assert linked is not None
    got = torch.empty(4)
    linked.post(got, torch.full((4,), float(dist.get_rank())))
    arrived = linked.land().clone()
    linked.flush()
    dist.barrier()
    return arrived.tolist()


def test_without_memfd_create_the_memory_is_an_unnamed_file():
    assert run(_linked, False, world=2, group=True) == [[1.0] * 4, [0.0] * 4]


def test_a_full_shared_memory_is_done_without():
    assert run(_linked, True, world=2, group=True) == [(True, 0)] * 2
