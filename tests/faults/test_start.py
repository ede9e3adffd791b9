"""Ranks that come late to the start of a job are waited for; those that never come are named on every rank."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import pytest

from lightning_3d.launch import torchrun
from tests.faults.squad import squad
from tests.faults.test_peers_fail import MODULES
from tests.parity import long, make_trainer


def start(rank, late, delay, patience, folder):
    torchrun.PATIENCE = patience
    if rank == late:
        time.sleep(delay)
    trainer = make_trainer(3, {"timeout": 3.0}, quiet=True, max_steps=2, limit_val_batches=0, default_root_dir=folder)
    trainer.fit(MODULES["MLP"]())
    return trainer.global_step


def test_a_rank_that_never_comes_is_named_by_all(tmp_path):
    with squad(start, 2, 60.0, 4.0, str(tmp_path), world=3, folder=tmp_path / "ended") as job:
        assert job.wait(40, [0, 1]) == []
        ended = job.ended
    for rank in (0, 1):
        assert ended[rank]["raised"] == "PeerError"
        assert "rank 2 of 3 did not come to the start" in ended[rank]["text"]
        assert ended[rank]["seconds"] < 20


def test_where_rank_0_never_comes_the_others_say_so(tmp_path):
    with squad(start, 0, 60.0, 3.0, str(tmp_path), world=3, folder=tmp_path / "ended") as job:
        assert job.wait(40, [1, 2]) == []
        for rank in (1, 2):
            assert job.ended[rank]["raised"] == "PeerError"
            assert "rank 0" in job.ended[rank]["text"]


@pytest.mark.parametrize("late", [0, long(2)])
def test_the_timeout_does_not_limit_the_start(tmp_path, late):
    with squad(start, late, 6.0, 60.0, str(tmp_path), world=3, folder=tmp_path / "ended") as job:
        assert job.wait(60) == []
        assert [job.ended[rank].get("returned") for rank in range(3)] == [2, 2, 2]


def test_a_rank_that_comes_first_does_not_sleep_until_rank_0_is_there(monkeypatch):
    """torch's own client waits up to a second after an attempt that failed."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = SimpleNamespace(main_address="127.0.0.1", main_port=probe.getsockname()[1])
    with ThreadPoolExecutor(1) as other:
        first = other.submit(torchrun.store_of_attempt, place, 1, 2, timedelta(seconds=60))
        time.sleep(0.05)
        began = time.monotonic()
        kept = torchrun.store_of_attempt(place, 0, 2, timedelta(seconds=60))
        first.result(60)
        assert time.monotonic() - began < 0.35
    assert kept
