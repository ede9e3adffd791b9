"""What stands in the job's store and on disk may be old, strange or not there: nobody is ended by it."""

import json
import linecache
import os
import subprocess
import time
import types
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from lightning_3d.faults import watchdog
from lightning_3d.faults.flight_recorder import Flight, put_aside
from lightning_3d.faults.verdict import Verdict
from tests.faults.squad import squad
from tests.faults.test_peers_fail import train
from tests.workers import WorkerError, run

DEEP = "[" * 100_000
GARBAGE = [
    b"\xff\xfe", b"", b"{}", b"[]", b"3", b'{"how": "odd", "ranks": {}, "detail": ""}', b'{"how": [], "ranks": {}, "detail": ""}',
    b'{"how": "failed", "ranks": [], "detail": ""}', b'{"how": "failed", "ranks": {"x": ""}, "detail": ""}',
    b'{"how": "failed", "ranks": {}, "detail": 3}', DEEP.encode(),
]  # fmt: skip


@pytest.mark.parametrize("text", GARBAGE, ids=lambda text: repr(text[:20]))
def test_garbage_is_no_verdict(text):
    assert Verdict.loads(text) is None


@pytest.mark.parametrize("beat", [b"\xff", b"[]", b"3", b'[1, "x", "y"]', b'{"a": 1}', DEEP.encode()])
def test_garbage_is_no_place(beat):
    assert watchdog._standing(beat) == "an unknown place"


def test_news_says_how_old_it_is():
    assert watchdog._standing(json.dumps([3, "step 2", time.time() - 7.2]).encode()) == "step 2, 7 s ago"


def test_a_verdict_without_ranks_is_a_sentence():
    assert Verdict("lost", {}, "the agent is gone").explain({}) == "the agent is gone"


def test_the_place_is_the_users_own_line_not_the_interpreters():
    """Parts of the standard library are frozen into the interpreter: their files have no folder."""
    module = types.ModuleType("frozen")
    source = "def inside(call):\n    return call()\n"
    exec(compile(source, "<frozen os>", "exec"), vars(module))
    linecache.cache.pop("<frozen os>", None)
    frame = module.inside(lambda: _library(_here))
    assert "test_records.py" in frame


def _here():
    return eval(compile("standing()", "<frozen os>", "eval"), {"standing": Flight().standing})


def _library(call):
    return call()


def test_records_of_an_earlier_run_are_put_aside(tmp_path):
    flight = tmp_path / "flight"
    for number in (1, 2):
        flight.mkdir()
        (flight / "rank-00000.json").write_text(str(number))
        put_aside(flight)
        put_aside(flight)  # another process of the same run
        assert [path.name for path in tmp_path.iterdir()] == ["flight_before"]
        assert (tmp_path / "flight_before" / "rank-00000.json").read_text() == str(number)


def stopped(folder):
    """Verdicts of a rank before and after it was stopped for longer than others wait."""
    watch = watchdog.Watchdog(dist.get_rank(), {0: "data 0", 1: "data 1"}, timeout=60.0, folder=Path(folder))
    watch.silence = 1.0
    before = watch._store_lost()
    if dist.get_rank() == 1:
        subprocess.run(["sh", "-c", f"(kill -STOP {os.getpid()}; sleep 1.5; kill -CONT {os.getpid()}) &"], check=True)
        time.sleep(0.5)
    after = watch._store_lost()
    dist.barrier()
    watch.close(ended=True)
    return [*before.ranks], after.how, [*after.ranks]


def test_a_rank_that_wakes_up_after_a_stop_blames_itself(tmp_path):
    for own, (before, how, after) in enumerate(run(stopped, str(tmp_path), world=2, group=True)):
        if own == 1:
            assert (how, after) == ("stopped", [1])
        assert before == []  # torchrun's agent serves the store


@pytest.mark.long
def test_a_run_begins_without_the_records_of_another(tmp_path):
    for attempt in (0, 1):
        (tmp_path / "fault").unlink(missing_ok=True)
        with squad(train, "ring", "raise", str(tmp_path), world=4, folder=tmp_path / f"ended{attempt}") as job:
            assert job.wait(60) == []
        if attempt == 0:
            Path(tmp_path, "flight", "rank-00007.json").write_text("of a larger run")
    assert sorted(path.name for path in (tmp_path / "flight").iterdir()) == [
        f"rank-{rank:05d}.json" for rank in range(4)
    ]
    assert (tmp_path / "flight_before" / "rank-00007.json").exists()


def served(folder, alive):
    """The time at which rank 1 ends, or falls silent, and the one at which rank 0 lets the store go."""
    with patch.dict(os.environ, {"TORCHELASTIC_USE_AGENT_STORE": "False"}):
        watch = watchdog.Watchdog(dist.get_rank(), {0: "data 0", 1: "data 1"}, timeout=1.0, folder=Path(folder))
        if dist.get_rank() == 0:
            watch.close(ended=True)
        else:
            time.sleep(4)
            watch.close(ended=alive)
        return time.time()


@pytest.mark.parametrize("alive", [True, False])
def test_rank_0_serves_the_store_until_the_others_end_or_are_silent(tmp_path, alive):
    served_until, ended = run(served, str(tmp_path), alive, world=2, group=True)
    assert -0.5 < served_until - ended < 30


def stuck(folder):
    """Rank 1 fails, and rank 0 is in something that no error reaches."""
    watchdog.GRACE = 0.5
    watch = watchdog.Watchdog(dist.get_rank(), {0: "data 0", 1: "data 1"}, timeout=5.0, folder=Path(folder))
    if dist.get_rank() == 0:
        time.sleep(60)
    watch.explained(ValueError("a bad batch"))


def test_a_rank_that_no_error_reaches_ends_with_the_reason(tmp_path):
    with pytest.raises(WorkerError, match="rank 0 died"):
        run(stuck, str(tmp_path), world=2, group=True)
    record = json.loads((tmp_path / "rank-00000.json").read_text())
    assert record["error"].startswith("Rank 1 (data 1) failed") and "a bad batch" in record["error"]
