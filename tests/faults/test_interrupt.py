"""Ctrl-C and sys.exit on one rank end the job soon, and the others say what it was; a dead rank 0 leaves its place."""

import os
import re
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from lightning.pytorch import Callback, Trainer

from lightning_3d import Strategy3D
from tests.faults.squad import squad
from tests.parity import QUIET, long
from tests.zoo import MODULES

TIMEOUT = 30.0


class Ends(Callback):
    def __init__(self, rank, how):
        self.rank, self.how = rank, how

    def on_train_batch_start(self, trainer, *_):
        if self.rank != 0 or trainer.global_step != 3:
            return
        time.sleep(2.5)  # the place is known by now
        Path(trainer.default_root_dir, "fault").write_text(str(time.time()))
        if self.how == "interrupt":
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            time.sleep(60)
        if self.how == "exit":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)


def train(rank, how, folder):
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    trainer = Trainer(
        **QUIET, devices=3, max_steps=100, limit_val_batches=0, default_root_dir=folder, callbacks=[Ends(rank, how)],
        strategy=Strategy3D(zero_stage=1, timeout=TIMEOUT, quiet=True),
    )  # fmt: skip
    trainer.fit(MODULES["MLP"]())


SAID = {
    "interrupt": r"Rank 0 \(.*\) was interrupted \(Ctrl-C\), last seen at step 3",
    "exit": r"Rank 0 \(.*\) ended itself \(sys.exit\), last seen at step 3.*exit code 3",
    "kill": r"Rank 0 \(.*\) does not answer .*step 3, .* in .*test_interrupt.py:\d+ \(on_train_batch_start\), \d+ s ago",
}


@pytest.mark.parametrize(("how", "seconds"), [("interrupt", 5.0), long("exit", 9.0), ("kill", 8.0)])
def test_the_others_say_how_rank_0_ended(tmp_path, how, seconds):
    with squad(train, how, str(tmp_path), world=3, folder=tmp_path / "ended") as job:
        assert job.wait(60) == []
        ended = job.ended
        fault = float((tmp_path / "fault").read_text())
        last = max(job.file(rank).stat().st_mtime for rank in ended)
    assert last - fault < seconds
    for rank in (1, 2):
        assert ended[rank]["raised"] == "PeerError"
        assert re.search(SAID[how], ended[rank]["text"]), ended[rank]["text"]
    assert ended.get(0, {}).get("raised") == (None if how == "kill" else "SystemExit")
