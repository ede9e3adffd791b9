"""What a process remembers of itself, and who is to blame."""

import json
import threading

import pytest
import torch.distributed as dist

from lightning_3d.errors import PeerError
from lightning_3d.faults.flight_recorder import LENGTH, Flight
from lightning_3d.faults.verdict import Verdict, judge
from lightning_3d.ranks.agreement import is_communication
from lightning_3d.ranks.talk import StoreGone, bounded

PLACES = {0: "data 0", 1: "data 1", 2: "data 2"}


def test_it_says_where_it_stands():
    flight = Flight()
    flight.at("training_step of batch 3", 7)
    assert flight.standing().startswith("step 7, training_step of batch 3, in ")
    assert "test_flight.py" in flight.standing()  # no collective: the line of the user's own code
    with flight.doing("all_reduce on data_parallel"):
        assert flight.standing() == "step 7, training_step of batch 3, in all_reduce on data_parallel"
    assert flight.entries[-1].seconds is not None


def test_what_runs_in_the_background_is_told_apart():
    flight, inside, leave = Flight(), threading.Event(), threading.Event()

    def work():
        with flight.doing("reduce_scatter on data_parallel"):
            inside.set()
            leave.wait(5)

    thread = threading.Thread(target=work)
    thread.start()
    inside.wait(5)
    assert "(in the background: reduce_scatter on data_parallel)" in flight.standing()
    leave.set()
    thread.join()
    assert "(in the background" not in flight.standing()


def test_the_first_that_failed_is_where_it_failed():
    flight = Flight()
    flight.at("training_step", 2)
    for name in ("first", "second"):
        with pytest.raises(ValueError), flight.doing(name):
            raise ValueError(name)
    assert flight.failing(ValueError()) == "step 2, training_step, in first"


def test_the_record_is_small_and_whole(tmp_path):
    flight = Flight()
    for step in range(3 * LENGTH):
        flight.at("training_step", step)
        with flight.doing("all_reduce"):
            pass
    flight.write(tmp_path / "flight" / "rank.json", error="boom")
    record = json.loads((tmp_path / "flight" / "rank.json").read_text())
    assert record["error"] == "boom"
    assert [entry["step"] for entry in record["entries"]] == list(range(2 * LENGTH, 3 * LENGTH))
    assert "MainThread" in record["stacks"]
    assert [path.name for path in (tmp_path / "flight").iterdir()] == ["rank.json"]


def test_silence_is_worse_than_lateness():
    verdict = judge({1: "step 3"}, {0: "step 4"}, {2: "step 2"})
    assert verdict.how == "lost"
    assert "rank 1 (data 1) does not answer" in verdict.explain(PLACES)
    assert "last seen at step 3" in verdict.explain(PLACES)


def test_who_did_not_come():
    assert judge({}, {0: "a", 2: "a"}, {1: "train.py:3"}).ranks == {1: "train.py:3"}


def test_who_waits_for_something_else():
    verdict = judge({}, {0: "all_reduce", 1: "barrier", 2: "all_reduce"}, {})
    assert verdict.ranks == {1: "barrier"}
    assert verdict.explain(PLACES).endswith("the others were at all_reduce")
    assert "zero_stage=0" in judge({}, {0: "all_gather on data_parallel", 1: "all_reduce on default_pg"}, {}).detail


def test_a_verdict_travels():
    verdict = Verdict("failed", {2: "step 1"}, "ValueError: boom")
    assert Verdict.loads(verdict.dumps()) == verdict


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (PeerError("x"), True),
        (dist.DistNetworkError("x"), True),
        (RuntimeError("[/x/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"), True),
        (RuntimeError("NCCL communicator was aborted"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("gloo"), False),
    ],
)
def test_what_comes_from_another_rank(error, expected):
    assert is_communication(error) is expected


def test_a_store_that_does_not_answer():
    with pytest.raises(StoreGone, match="did not answer"):
        bounded(threading.Event().wait, 0.05)
    with pytest.raises(KeyError):
        bounded(lambda: {}["x"], 1.0)
    assert bounded(lambda: 3, 1.0) == 3
