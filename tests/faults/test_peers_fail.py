"""One rank fails, dies, stops, goes astray or never comes: the others end in time and say which, where and in what."""

import json
import os
import signal
import socket
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, seed_everything

from lightning_3d.launch import first_meeting
from tests.faults.squad import squad
from tests.parity import long, make_trainer
from tests.zoo import MODULES

TIMEOUT, SLACK = 5.0, 8.0
"""Seconds after which ranks give up, and until they have agreed on who it was, on a busy machine."""
LAYOUTS = {
    "ring": {"zero_stage": 0},
    "zero": {"zero_stage": 2},
    "tensor": {"tensor_parallel_size": 2, "zero_stage": 1},
    "pipeline": {"pipeline_parallel_size": 2, "zero_stage": 1},
}
VICTIM, STEP = 1, 3
PLACE = {"ring": "data 1", "zero": "data 1", "tensor": "tensor 1", "pipeline": "data 1"}


class Fault(Callback):
    """What `how` says happens to one rank when a step begins."""

    def __init__(self, rank, how):
        self.rank, self.how = rank, how

    def on_train_batch_start(self, trainer, *_):
        if self.rank != VICTIM or trainer.global_step != STEP:
            return
        Path(trainer.default_root_dir, "fault").write_text(str(time.time()))
        if self.how == "raise":
            raise ValueError("boom")
        if self.how in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self.how == "kill" else signal.SIGSTOP)
        if self.how == "hang":
            time.sleep(1000)
        if self.how == "astray":
            torch.distributed.barrier()


def train(rank, layout, how, folder):
    warnings.simplefilter("ignore")
    seed_everything(7, verbose=False)
    trainer = make_trainer(
        4,
        {**LAYOUTS[layout], "timeout": TIMEOUT},
        quiet=True,
        max_epochs=100,
        limit_val_batches=0,
        default_root_dir=folder,
        callbacks=[Fault(rank, how)],
    )
    trainer.fit(MODULES["MLP"]())


def case(layout, how, marks=()):
    return pytest.param(layout, how, id=f"{layout}-{how}", marks=marks)


CASES = [
    case("zero", "kill"),
    case("pipeline", "stop", pytest.mark.long),
    case("tensor", "raise"),
    *[
        case(layout, how, pytest.mark.long)
        for layout, how in (
            ("ring", "raise"), ("tensor", "kill"), ("pipeline", "kill"), ("ring", "kill"),
            ("ring", "stop"), ("zero", "stop"), ("tensor", "stop"), ("zero", "hang"), ("tensor", "astray"),
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize(("layout", "how"), CASES)
def test_survivors_name_who_and_where(tmp_path, layout, how):
    survivors = [rank for rank in range(4) if rank != VICTIM]
    with squad(train, layout, how, str(tmp_path), world=4, folder=tmp_path / "ended") as job:
        assert job.wait(60, survivors) == []
        ended = job.ended
        moment = float((tmp_path / "fault").read_text())
        took = [job.file(rank).stat().st_mtime - moment for rank in survivors]
    assert max(took) < TIMEOUT + SLACK
    for rank in survivors:
        assert ended[rank]["raised"] == "PeerError"
        text = ended[rank]["text"]
        assert f"ank {VICTIM} (" in text
        assert PLACE[layout] in text
        assert f"step {STEP}" in text
        record = json.loads((tmp_path / "flight" / f"rank-{rank:05d}.json").read_text())
        assert record["rank"] == rank
        assert record["entries"]
    if how == "raise":
        assert "ValueError: boom" in ended[0]["text"]
        assert ended[VICTIM]["raised"] == "ValueError"


def start(rank, late, delay, patience, folder):
    first_meeting.PATIENCE = patience
    if rank == late:
        time.sleep(delay)
    trainer = make_trainer(3, {"timeout": 3.0}, quiet=True, max_steps=2, limit_val_batches=0, default_root_dir=folder)
    trainer.fit(MODULES["MLP"]())
    return trainer.global_step


@pytest.mark.parametrize(("late", "words"), [(2, "rank 2 of 3 did not come to the start"), (0, "rank 0")])
def test_a_rank_that_never_comes_is_named_by_all(tmp_path, late, words):
    here = [rank for rank in range(3) if rank != late]
    with squad(start, late, 60.0, 4.0, str(tmp_path), world=3, folder=tmp_path / "ended") as job:
        assert job.wait(40, here) == []
        ended = job.ended
    for rank in here:
        assert ended[rank]["raised"] == "PeerError"
        assert words in ended[rank]["text"]
        assert ended[rank]["seconds"] < 20


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
        first = other.submit(first_meeting.store_of_attempt, place, 1, 2, timedelta(seconds=60))
        time.sleep(0.05)
        began = time.monotonic()
        kept = first_meeting.store_of_attempt(place, 0, 2, timedelta(seconds=60))
        first.result(60)
        assert time.monotonic() - began < 0.35
    assert kept
