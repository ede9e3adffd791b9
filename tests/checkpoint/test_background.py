"""Saves beside training, and saves that fail: training goes on, and nothing that was whole is lost."""

import errno
from datetime import timedelta
from threading import Event

import pytest
import torch

from lightning_3d.checkpoint.keeper import Background
from lightning_3d.checkpoint.stored import Opened
from tests.checkpoint.savers import fail_beside, run_into_full_disk, save_beside, weights_of
from tests.workers import run

BESIDE = {"async_checkpoint": True}
FORMATS = ["sharded", "full"]


def stored(path, format):
    if format == "full":
        return weights_of(path)
    opened = Opened.open(path)
    opened.verify()
    return dict(opened.state()["state_dict"].items())


@pytest.mark.parametrize("format", FORMATS)
def test_training_goes_on_and_what_is_saved_is_of_the_moment(tmp_path, format):
    layout = {"checkpoint_format": format, "zero_stage": 0, **BESIDE}
    order, weights = run(save_beside, 2, layout, str(tmp_path), world=2)[0]
    assert order.index("goes on") < order.index("writes")
    assert order.index("three steps on") < order.index("writes")
    assert order.count("writes") == order.count("begins")  # the last one was awaited
    found = stored(tmp_path / "a.ckpt", format)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], weight) for key, weight in weights.items())
    assert not all(torch.equal(stored(tmp_path / "b.ckpt", format)[key], weight) for key, weight in weights.items())


def test_a_full_disk_is_told_at_the_next_save(tmp_path):
    error = OSError(errno.ENOSPC, "No space left on device")
    layout = {"checkpoint_format": "sharded", **BESIDE}
    ranks = run(fail_beside, 2, layout, str(tmp_path), error, world=2)
    assert [steps for steps, _ in ranks] == [{"two": 2, "four": 4}] * 2
    (message,) = ranks[0][1]
    assert "a.ckpt was not saved" in message
    assert "No space left" in message
    assert [path.name for path in tmp_path.iterdir()] == ["b.ckpt"]


def test_any_other_failure_ends_training_at_the_next_save(tmp_path):
    layout = {"checkpoint_format": "sharded", **BESIDE}
    for steps, message in run(fail_beside, 2, layout, str(tmp_path), ValueError("odd"), world=2):
        assert steps == {"two": 2}
        assert message.startswith("CheckpointError")
        assert "a.ckpt was not saved" in message
        assert "odd" in message


@pytest.mark.parametrize("beside", [False, True], ids=["now", "beside"])
@pytest.mark.parametrize("format", FORMATS)
def test_full_disk_in_training(tmp_path, format, beside):
    layout = {"checkpoint_format": format, "async_checkpoint": beside}
    ranks = run(run_into_full_disk, 2, layout, str(tmp_path), world=2)
    for steps, there, _ in ranks:
        assert steps == 6
        assert there[2] == ["step=1.ckpt/whole"]
        # while the disk is full the last that was whole stays, and nothing else
        assert there[3] == there[4] == ["step=1.ckpt/whole"]
        assert there[5] == ["step=4.ckpt/whole"]
        assert there[6] == ["step=5.ckpt/whole"]
    messages = ranks[0][2]
    assert sum("was not saved" in text and "Training continues" in text for text in messages) == 2


@pytest.mark.parametrize("asked", ["while it runs", "when it is over"])
@pytest.mark.parametrize("fails", [False, True])
def test_what_comes_after_waits_for_success(asked, fails):
    background, go_on, done = Background(), Event(), []

    def work(group):
        assert go_on.wait(10)
        assert group is None
        if fails:
            raise ValueError("full")

    background.start(work, timedelta(seconds=10))
    if asked == "while it runs":
        background.afterwards(lambda: done.append("removed"))
        assert done == []
        go_on.set()
    else:
        go_on.set()
        background._thread.join(10)  # over, but what went wrong was not told yet
        background.afterwards(lambda: done.append("removed"))
    if fails:
        with pytest.raises(ValueError, match="full"):
            background.wait()
    else:
        background.wait()
    assert done == ([] if fails else ["removed"])
    background.wait()  # told once
