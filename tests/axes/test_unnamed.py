"""The ring on one machine works with builds of Python that lack parts of the operating system."""

import os
from unittest import mock

import torch
import torch.distributed as dist

from lightning_3d.axes import ring_wire
from tests.workers import run


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
