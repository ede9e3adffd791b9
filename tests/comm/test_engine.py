"""Jobs run in order, errors come out where they are waited for, and a dead peer is an error, not a hang."""

import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_3d.axes.ledger import Ledger
from lightning_3d.comm.background_queue import BackgroundQueue
from lightning_3d.errors import PeerError
from tests.axes.rings import ring
from tests.workers import WorkerError, run


@pytest.fixture(params=[True, False], ids=["threaded", "inline"])
def engine(request):
    engine = BackgroundQueue(threaded=request.param)
    yield engine
    engine.close()


def test_jobs_run_in_the_order_of_submission(engine):
    seen = []
    handles = [engine.submit(lambda i=i: seen.append(i)) for i in range(50)]
    for handle in reversed(handles):
        handle.wait()
    assert seen == list(range(50))


def test_an_error_surfaces_at_wait_and_fails_what_comes_after(engine):
    ran = []
    broken = engine.submit(lambda: 1 / 0)
    after = engine.submit(lambda: ran.append(1))
    with pytest.raises(ZeroDivisionError):
        broken.wait()
    with pytest.raises(PeerError, match="earlier collective failed"):
        after.wait()
    assert not ran


def test_close_finishes_what_was_submitted_and_refuses_more():
    engine, seen = BackgroundQueue(), []
    engine.submit(lambda: (time.sleep(0.1), seen.append(1)))
    engine.close()
    assert seen == [1]
    assert not any(thread.name == "lightning_3d.comm" for thread in threading.enumerate())
    with pytest.raises(PeerError, match="closed"):
        engine.submit(lambda: None)
    engine.close()


def _peer_dies():
    group = dist.new_group(timeout=timedelta(seconds=5))
    group, engine, buffer = ring(group), BackgroundQueue(), torch.ones(1 << 20)
    engine.submit(lambda: group.all_reduce(buffer, average=True)).wait()
    if dist.get_rank() == 1:
        os._exit(3)
    start = time.monotonic()
    with pytest.raises(PeerError, match="did not answer"):
        engine.submit(lambda: group.all_reduce(buffer, average=True)).wait()
    assert time.monotonic() - start < 10
    engine.close()


def test_a_dead_peer_raises():
    with pytest.raises(WorkerError, match="rank 1 died") as error:
        run(_peer_dies, world=2, group=True, timeout=20)
    assert "--- rank 0" not in str(error.value)


def test_the_ledger_counts_and_forgets():
    ledger = Ledger()
    ledger.add("data", "all_reduce", 10)
    ledger.add("data", "all_reduce", 5)
    ledger.add("tensor", "all_gather", 7)
    assert [tuple(row) for row in ledger.rows()] == [("data", "all_reduce", 2, 15), ("tensor", "all_gather", 1, 7)]
    assert (ledger.bytes(), ledger.bytes("data"), ledger.bytes(collective="all_gather")) == (22, 15, 7)
    ledger.reset()
    assert ledger.rows() == []
