"""Saves in the background and on disks that refuse; run by the workers of `tests/workers.py`."""

import errno
import importlib
import os
import time
from pathlib import Path
from threading import Event

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_3d import Strategy3D
from tests.checkpoint.trainings import build
from tests.parity import QUIET, caught_warnings


class FullDisk:
    """While it is full, whatever is written turns out not to have been."""

    def __init__(self):
        self.fsync = os.fsync

    def fill(self):
        def refuse(_):
            raise OSError(errno.ENOSPC, "No space left on device")

        os.fsync = refuse

    def free(self):
        os.fsync = self.fsync


class At(Callback):
    """Does something at the end of a step."""

    def __init__(self, **steps):
        self.steps = {int(key.removeprefix("s")): do for key, do in steps.items()}

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step in self.steps:
            self.steps.pop(trainer.global_step)(trainer)


def fit(world, strategy, steps, *callbacks):
    module = build("MLP")
    flags = {**QUIET, "enable_checkpointing": True, "limit_val_batches": 0, "max_steps": steps, "max_epochs": -1}
    trainer = Trainer(**flags, devices=world, strategy=Strategy3D(**strategy), callbacks=list(callbacks))
    with caught_warnings() as seen:
        trainer.fit(module)
    return module, seen


def run_into_full_disk(world, strategy, folder):
    """Save at every step but find the disk full at the second and third. What is there before each save."""
    folder, there, disk = Path(folder), {}, FullDisk()

    def look(trainer):
        trainer.strategy.checkpoints.keeper.wait()
        trainer.strategy.barrier()
        there[trainer.global_step] = sorted(
            f"{path.name}/{'whole' if path.is_file() or (path / 'manifest.json').exists() else 'broken'}"
            for path in folder.iterdir()
        )

    def fill(trainer):
        look(trainer)
        disk.fill()

    def free(trainer):
        look(trainer)
        disk.free()

    keep = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, filename="{step}", save_top_k=1)
    after = At(s1=look, s2=fill, s3=look, s4=free, s5=look, s6=look)
    module, messages = fit(world, strategy, 6, keep, after)
    return len(module.seen), there, [text for text in messages if "not saved" in text or "is kept" in text]


def save_beside(world, strategy, folder):
    """Save while writing takes until the training has gone on."""
    went_on, order = Event(), []
    full = strategy["checkpoint_format"] == "full"
    place = importlib.import_module(f"lightning_3d.checkpoint.{'keeper' if full else 'save'}")
    name = "save_file" if full else "write"
    write = getattr(place, name)

    def slow(*args):
        order.append("begins")
        assert went_on.wait(20), "training stood still"
        order.append("writes")
        return write(*args)

    setattr(place, name, slow)
    weights = {}

    def first(trainer):
        weights.update({k: v.clone() for k, v in trainer.lightning_module.state_dict().items()})
        trainer.save_checkpoint(Path(folder) / "a.ckpt")
        order.append("goes on")

    def third(trainer):
        order.append("three steps on")
        went_on.set()

    def fourth(trainer):
        trainer.save_checkpoint(Path(folder) / "b.ckpt")  # waits for the first
        assert "writes" in order or "begins" not in order  # in one file, only the first rank writes

    try:
        fit(world, strategy, 5, At(s1=first, s3=third, s4=fourth))
    finally:
        setattr(place, name, write)
    return order, weights


def fail_beside(world, strategy, folder, error):
    """A save in the background that goes wrong; what the next one says."""
    import lightning_3d.checkpoint.save as place

    write, failures = place.write, iter([True])

    def broken(*args):
        if next(failures, False):
            raise error
        return write(*args)

    place.write = broken
    steps = {}
    try:
        _, messages = fit(world, strategy, 4,
                      At(s1=lambda t: t.save_checkpoint(Path(folder) / "a.ckpt"),
                         s2=lambda t: (time.sleep(0.2), steps.setdefault("two", t.global_step)),
                         s3=lambda t: t.save_checkpoint(Path(folder) / "b.ckpt"),
                         s4=lambda t: steps.setdefault("four", t.global_step)))  # fmt: skip
    except Exception as caught:
        return steps, f"{type(caught).__name__}: {caught}"
    finally:
        place.write = write
    return steps, [text for text in messages if "not saved" in text]


def weights_of(path):
    return torch.load(path, weights_only=True)["state_dict"]
