"""No host waits for its device in a steady step: nothing in Python reads a number from a tensor of the training.

On CPUs each read is counted by the line that asks for it. Where there is a GPU, torch itself raises (tests/gpu).
"""

import os
import re
import sys
from collections import Counter

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import DeviceStatsMonitor, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_3d import Monitor3D, Precision3D, Strategy3D
from tests.parity import QUIET, long
from tests.workers import on_ranks, run

READS = (
    "item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "nonzero", "equal", "allclose",
)  # fmt: skip
HOSTS = ("ranks/talk.py", "ranks/random_streams.py", "torch/optim/", "pipeline/across_samples.py")
"""Read numbers of the host alone: messages over gloo, seeds, the step counts of torch's optimizers, and what a device
has written for the host a step ago."""
FIRST, LAST = 5, 15


class Net(LightningModule):
    fused = None

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 32)
        layer = {"d_model": 32, "nhead": 2, "dim_feedforward": 64, "dropout": 0.0, "batch_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(**layer) for _ in range(4))
        self.head = nn.Linear(32, 32)

    def training_step(self, batch, batch_idx):
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.embed(batch).mean())

    def val_dataloader(self):
        return DataLoader(torch.randint(0, 32, (4, 8)), batch_size=4)

    def train_dataloader(self):
        return DataLoader(torch.randint(0, 32, (4 * 20, 8)), batch_size=4)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, fused=self.fused)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class TiedNet(Net):
    """Its stages sum the gradient of a tie, and batch norms sum over data ranks."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(32)
        self.embed.register_forward_hook(lambda _, args, x: self.norm(x.flatten(0, 1)).view_as(x))


class FusedNet(Net):
    fused = True


class Count(Callback):
    """The lines that read a number between two steps, other than of the host's own."""

    def __init__(self):
        self.found, self.counting = Counter(), False

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.counting = FIRST <= batch_idx < LAST

    def patch(self, monkeypatch):
        for name in READS:
            monkeypatch.setattr(torch.Tensor, name, self._reading(name))

    def _reading(self, name):
        original = getattr(torch.Tensor, name)

        def read(tensor, *args, **kwargs):
            if self.counting:
                frame = sys._getframe(1)
                while re.search(r"/torch/(?!optim/)|/sandbox/writes", frame.f_code.co_filename):  # for their callers
                    frame = frame.f_back
                place = frame.f_code.co_filename.replace(os.sep, "/")
                if not any(host in place for host in HOSTS):
                    self.found[f"{name} in {'/'.join(place.split('/')[-2:])}:{frame.f_lineno}"] += 1
            return original(tensor, *args, **kwargs)

        return read


def _reads(strategy, trainer, monitored, kind=Net, callbacks=()):
    count = Count()
    with pytest.MonkeyPatch.context() as monkeypatch:
        count.patch(monkeypatch)
        flags = {
            "devices": int(os.environ["WORLD_SIZE"]),
            "max_steps": LAST + 2,
            "callbacks": [count, *([Monitor3D()] if monitored else []), *callbacks],
        }
        Trainer(**{**QUIET, **flags, **trainer}, strategy=Strategy3D(**strategy, quiet=True)).fit(kind())
    return dict(count.found)


@pytest.mark.parametrize(
    ("strategy", "trainer", "monitored"),
    [
        ({"zero_stage": 0}, {"gradient_clip_val": 0.5}, False),
        ({"zero_stage": 1}, {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2, "max_steps": 9}, True),
        ({"zero_stage": 2}, {}, False),
        ({"zero_stage": 3}, {"precision": "bf16-mixed"}, True),
        ({"tensor_parallel_size": 2}, {"gradient_clip_val": 0.5}, True),
        ({"pipeline_parallel_size": 2}, {}, True),
    ],
    ids=["zero0", "zero1", "zero2", "zero3", "tensor", "pipeline"],
)
def test_nothing_reads_a_number_in_a_steady_step(strategy, trainer, monitored):
    assert run(_reads, strategy, trainer, monitored, world=2) == [{}, {}]


@pytest.mark.long
def test_nothing_reads_a_number_with_all_axes():
    strategy = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert run(_reads, strategy, {"gradient_clip_val": 0.5}, True, world=4, timeout=120) == [{}] * 4


def _with_callbacks(folder):
    callbacks = [
        EarlyStopping("val_loss", patience=100),
        LearningRateMonitor("step"),
        DeviceStatsMonitor(),
        ModelCheckpoint(folder, monitor="val_loss"),
    ]
    flags = {"logger": CSVLogger(folder), "enable_checkpointing": True, "limit_train_batches": LAST + 2}
    return _reads({"zero_stage": 2}, {**flags, "gradient_clip_val": 0.5}, True, callbacks=callbacks)


def test_nothing_reads_a_number_with_lightnings_callbacks(tmp_path):
    assert run(_with_callbacks, str(tmp_path), world=2) == [{}, {}]


@pytest.mark.parametrize(
    ("strategy", "trainer"),
    [({"pipeline_parallel_size": 2}, {"plugins": "16-mixed"}), long({"zero_stage": 3}, {"sync_batchnorm": True})],
    ids=["pipeline", "zero3"],
)
def test_ties_batch_norms_and_scales_are_read_by_nobody(strategy, trainer):
    assert run(_scaled, TiedNet, strategy, trainer, world=2) == [{}, {}]


def _scaled(kind, strategy, trainer):
    plugins = {"plugins": [Precision3D(trainer["plugins"])]} if "plugins" in trainer else {}
    kind.fused = True if plugins and kind is not Net else None
    return _reads(strategy, {**trainer, **plugins}, False, kind)


@pytest.mark.parametrize(("kind", "reads"), [(FusedNet, 0), long(Net, 1)], ids=["fused", "usual"])
def test_a_loss_scale_is_read_where_the_optimizer_is_not_fused(kind, reads):
    for found in run(_scaled, kind, {"zero_stage": 2}, {"plugins": "16-mixed"}, world=2):
        assert sum(found.values()) == reads * (LAST - FIRST)
        assert all(line.startswith("item in lightning_3d/precision.py") for line in found)  # `GradScaler.step`


@on_ranks(1, group=False)
def test_a_read_is_found():
    class Reading(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            float(loss)
            return loss

    reads = _reads({}, {"limit_val_batches": 0}, False, Reading)
    found = [number for line, number in reads.items() if "__float__ in" in line and "test_no_waits" in line]
    assert sum(found) == LAST - FIRST
