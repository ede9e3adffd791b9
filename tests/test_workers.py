"""The pool that every multi-process test runs on."""

import time

import pytest
import torch
import torch.distributed as dist

from lightning_3d.ranks import talk
from tests.workers import WorkerError, WorkerHang, run


def _total(value):
    tensor = torch.tensor([value + dist.get_rank()])
    dist.all_reduce(tensor)
    return tensor.item()


def _fail_on_one():
    if dist.get_rank() == 1:
        raise ValueError("rank one says no")
    dist.barrier()


def _hang_on_one():
    if dist.get_rank() == 1:
        time.sleep(100)
    dist.barrier()


def _patience(seconds=None):
    before, talk.PATIENCE = talk.PATIENCE, seconds or talk.PATIENCE
    return before


def test_every_rank_returns():
    assert run(_total, 10, world=3, group=True) == [33, 33, 33]


def test_a_constant_that_a_job_sets_is_back_for_the_next():
    first = run(_patience, 1.5, world=2)
    assert run(_patience, world=2) == first != [1.5, 1.5]


def test_an_error_on_one_rank_is_the_test_error():
    with pytest.raises(WorkerError, match="rank one says no"):
        run(_fail_on_one, world=2, group=True)


def test_a_hang_names_where_each_rank_stands():
    with pytest.raises(WorkerHang, match="_hang_on_one"):
        run(_hang_on_one, world=2, group=True, timeout=3)


def test_the_pool_works_after_a_hang():
    assert run(_total, 0, world=2, group=True) == [1, 1]
