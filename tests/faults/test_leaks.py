"""Fits in one process, failing or not, leave neither threads nor descriptors behind: flat after the second."""

import gc
import os
import time
from itertools import product
from operator import le

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_3d import Strategy3D
from lightning_3d.errors import PeerError
from tests.parity import QUIET, long
from tests.workers import run
from tests.zoo import MODULES

FITS = 4


class Boom(Callback):
    """Fails on every rank, or on the second one only."""

    def __init__(self, every):
        self.every = every

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 2 and (self.every or trainer.global_rank == 1):
            raise ValueError("boom")


ALL, ONE = "all ranks fail", "one rank fails"


def fits(failing, settings, folder):
    counts = []
    for _ in range(FITS):
        keep = ModelCheckpoint(dirpath=folder, every_n_train_steps=2)
        trainer = Trainer(
            **{**QUIET, "enable_checkpointing": True}, devices=2, max_steps=4, max_epochs=-1, limit_val_batches=0,
            callbacks=[keep, *([Boom(failing == ALL)] if failing else [])], default_root_dir=folder,
            strategy=Strategy3D(**settings, timeout=12.0 if failing == ONE else 20.0, quiet=True),
        )  # fmt: skip
        try:
            trainer.fit(MODULES["MLP"]())
        except PeerError:
            assert failing == ONE
        except ValueError:
            assert failing
        else:
            assert not failing
        gc.collect()
        counts.append(settled(counts[1] if len(counts) > 1 else None))
    return counts


def settled(bar):
    """Threads and descriptors, once none is above `bar` or ten seconds have passed.

    Sockets of a job that has ended are closed by threads of gloo and of the store's server, some time later.
    """
    deadline = time.monotonic() + 10
    while True:
        now = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
        if bar is None or all(map(le, now, bar)) or time.monotonic() > deadline:
            return now
        time.sleep(0.05)


SEVERAL = (*({"zero_stage": stage} for stage in (0, 1, 3)), {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2})
ASYNC = {"async_checkpoint": True, "checkpoint_format": "sharded"}


@pytest.mark.parametrize(
    ("failing", "settings"),
    [
        (ALL, {"zero_stage": 3}), (None, ASYNC),
        *[
            long(failing, settings)
            for failing, settings in product((ALL, ONE), (*SEVERAL, ASYNC))
        ]
    ]
)  # fmt: skip
def test_flat_after_the_second_fit(tmp_path, failing, settings):
    for counts in run(fits, failing, settings, str(tmp_path), world=2, fresh=True):
        for kind in zip(*counts, strict=True):  # threads, then descriptors
            assert max(kind[2:]) <= kind[1] + 1, counts
