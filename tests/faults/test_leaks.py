"""Fits in one process, failing or not, leave neither threads nor descriptors behind: flat after the second."""

import gc
import os
import warnings

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_3d import Strategy3D
from tests.parity import QUIET
from tests.workers import run
from tests.zoo import MODULES

FITS = 4


class Boom(Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 2:
            raise ValueError("boom")


def fits(failing, settings, folder):
    warnings.simplefilter("ignore")
    counts = []
    for _ in range(FITS):
        keep = ModelCheckpoint(dirpath=folder, every_n_train_steps=2)
        trainer = Trainer(
            **{**QUIET, "enable_checkpointing": True}, devices=2, max_steps=4, max_epochs=-1, limit_val_batches=0,
            callbacks=[keep, *([Boom()] if failing else [])], default_root_dir=folder,
            strategy=Strategy3D(**settings, timeout=20.0, quiet=True),
        )  # fmt: skip
        try:
            trainer.fit(MODULES["MLP"]())
        except ValueError:
            assert failing
        else:
            assert not failing
        gc.collect()
        counts.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    return counts


ASYNC = {"async_checkpoint": True, "checkpoint_format": "sharded"}


@pytest.mark.parametrize(
    ("failing", "settings"),
    [
        (True, {"zero_stage": 3}), (False, ASYNC),
        *[
            pytest.param(True, settings, marks=pytest.mark.long)
            for settings in ({"zero_stage": 1}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, ASYNC)
        ],
    ],
)  # fmt: skip
def test_flat_after_the_second_fit(tmp_path, failing, settings):
    for counts in run(fits, failing, settings, str(tmp_path), world=2, fresh=True):
        for kind in zip(*counts, strict=True):  # threads, then descriptors
            assert max(kind[2:]) <= kind[1] + 1, counts
