"""Saves beside training, and saves that fail: training goes on, and nothing that was whole is lost."""

import errno
import os
import signal
import threading
import time
import warnings
from datetime import timedelta
from threading import Event

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

import lightning_3d.checkpoint.save as place
from lightning_3d import Strategy3D
from lightning_3d.checkpoint.keeper import Background
from lightning_3d.checkpoint.stored import Opened
from lightning_3d.errors import PeerError
from tests.checkpoint.savers import fail_beside, run_into_full_disk, save_beside, weights_of
from tests.faults.squad import squad
from tests.parity import QUIET
from tests.workers import run
from tests.zoo import MODULES

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


VICTIM, TIMEOUT = 1, 5.0


class SaveAndDie(Callback):
    """All begin to save at each step; one rank is killed a moment after the third began."""

    def __init__(self, rank, folder):
        self.rank, self.folder = rank, folder

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 3 and self.rank == VICTIM:
            threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
        trainer.save_checkpoint(f"{self.folder}/{trainer.global_step}.ckpt")


def train(rank, format, folder):
    warnings.simplefilter("ignore")
    write = place.write

    def slow(job):
        if job.path.name == "3.ckpt":
            time.sleep(0.5)
        return write(job)

    place.write = slow
    seed_everything(7, verbose=False)
    strategy = Strategy3D(zero_stage=2, timeout=TIMEOUT, quiet=True, async_checkpoint=True, checkpoint_format=format)
    flags = {**QUIET, "limit_val_batches": 0, "max_epochs": 100, "default_root_dir": folder, "devices": 3}
    Trainer(**flags, callbacks=[SaveAndDie(rank, folder)], strategy=strategy).fit(MODULES["MLP"]())


@pytest.mark.parametrize("format", ["sharded", "full"])
def test_survivors_say_who_died(tmp_path, format):
    survivors = [rank for rank in range(3) if rank != VICTIM]
    with squad(train, format, str(tmp_path), world=3, folder=tmp_path / "ended") as job:
        assert job.wait(60, survivors) == []
        ended = job.ended
    for rank in survivors:
        assert ended[rank]["raised"] == "PeerError", ended[rank]
        assert f"ank {VICTIM} (" in ended[rank]["text"]


def test_what_a_save_ran_into_does_not_take_the_place_of_the_error(monkeypatch):
    strategy, ended = Strategy3D(async_checkpoint=True), []

    def gone(patience):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(strategy.checkpoints.keeper, "wait", gone)
    monkeypatch.setattr(strategy.failure, "end", lambda error, module: ended.append(error))
    error = PeerError("rank 1 died")
    with pytest.warns(UserWarning, match="Connection closed by peer"):
        strategy.on_exception(error)
    assert ended == [error]
