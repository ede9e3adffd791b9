"""A process that ends while its main thread waits in a call that never returns, as NCCL's watchdog ends it."""

import json
import os
import threading
import time
import warnings

from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_3d import Strategy3D
from lightning_3d.faults.flight_recorder import set_nccl_watchdog
from tests.faults.squad import squad
from tests.parity import QUIET
from tests.workers import run
from tests.zoo import MODULES

TIMEOUT = 8.0


class Stuck(Callback):
    """Rank 1 never comes back from a hook. Any rank is aborted at the timeout, which no Python code sees coming."""

    def __init__(self, rank):
        self.rank = rank

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 2:
            threading.Thread(target=self.abort, daemon=True).start()
            if self.rank == 1:
                never_returns()

    def abort(self):
        time.sleep(0.95 * TIMEOUT)
        os._exit(6)  # as abort() does, but without a core file


def never_returns():
    threading.Event().wait()


def train(rank, folder):
    warnings.simplefilter("ignore")
    seed_everything(7, verbose=False)
    strategy = Strategy3D(zero_stage=0, timeout=TIMEOUT, quiet=True)
    trainer = Trainer(
        **QUIET, devices=3, max_epochs=9, limit_val_batches=0, default_root_dir=folder, callbacks=[Stuck(rank)],
        strategy=strategy,
    )  # fmt: skip
    trainer.fit(MODULES["MLP"]())


def test_a_process_that_is_aborted_has_said_who_is_missing(tmp_path):
    with squad(train, str(tmp_path), world=3, folder=tmp_path / "ended") as job:
        assert job.wait(90) == []
        assert job.ended == {}  # no rank came back from the call that it waits in
    for rank in range(3):
        record = json.loads((tmp_path / "flight" / f"rank-{rank:05d}.json").read_text())
        assert "Nothing has moved here for" in record["error"]
        assert "ank 1 (pipeline 0, data 1, tensor 0) was elsewhere" in record["error"]
        assert "never_returns" in record["error"]
        assert "the others were at" in record["error"]


class LongHook(Callback):
    """All ranks spend more than the timeout in a hook."""

    def on_train_epoch_end(self, *_):
        time.sleep(1.2 * SHORT)


SHORT = 3.0


def spend_long(folder):
    strategy = Strategy3D(zero_stage=1, timeout=SHORT, quiet=True)
    flags = {"devices": 2, "max_epochs": 1, "limit_val_batches": 0, "default_root_dir": folder}
    Trainer(**QUIET, **flags, callbacks=[LongHook()], strategy=strategy).fit(MODULES["MLP"]())


def test_a_long_hook_of_all_ranks_is_no_failure(tmp_path):
    run(spend_long, str(tmp_path), world=2)
    assert not list(tmp_path.glob("flight/*"))


def test_settings_of_the_user_stay(tmp_path, monkeypatch):
    names = ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_BUFFER_SIZE", "TORCH_FR_DUMP_TEMP_FILE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    set_nccl_watchdog("gloo", tmp_path)
    assert not any(name in os.environ for name in names)
    monkeypatch.setenv(names[1], "7")
    set_nccl_watchdog("cpu:gloo,cuda:nccl", tmp_path)
    assert [os.environ.pop(name) for name in names] == ["1", "7", f"{tmp_path}/nccl-rank-"]
