"""A rank dies while all save in the background: the others say who, not what their saves ran into."""

import os
import signal
import threading
import time
import warnings

import pytest
from lightning.pytorch import Callback, Trainer, seed_everything

import lightning_3d.checkpoint.save as place
from lightning_3d import Strategy3D
from lightning_3d.errors import PeerError
from tests.faults.squad import squad
from tests.parity import QUIET
from tests.zoo import MODULES

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
