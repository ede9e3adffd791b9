"""What runs before training leaves nothing behind, wherever the user's step keeps it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_3d import Strategy3D
from lightning_3d.sandbox.trial import trial
from tests.parity import QUIET, make_trainer
from tests.workers import run
from tests.zoo.batchless import MLP, vectors


class StepMeter:
    """Kept by users to average; its inner one refers back."""

    def __init__(self, of=None):
        self.count, self.total, self.of = 0, torch.zeros(()), of
        self.inner = StepMeter(self) if of is None else None

    def __call__(self, value, count):
        self.count += count
        self.total += value.detach() * count
        if self.inner:
            self.inner(value, count)


class Metering(MLP):
    def __init__(self):
        super().__init__()
        self.meter, self.meters = StepMeter(), {"train": [StepMeter()]}
        self.table, self.array = torch.zeros(3), np.zeros(3)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch["x"]), batch["y"])
        self.meter(loss, len(batch["x"]))
        self.meters["train"][0](loss, len(batch["x"]))
        for label in batch["y"].tolist():
            self.table[label] += 1
            self.array[label] += 1
        return loss

    def kept(self):
        meters = (self.meter, self.meter.inner, *self.meters["train"])
        return [*(meter.count for meter in meters), self.table.tolist(), self.array.tolist()]


def test_a_step_that_runs_ahead_is_undone_in_objects_and_in_place():
    module = Metering()
    began = module.kept()
    with trial(module, gradients=True):
        module.training_step(vectors(8, 0), 0)
        assert module.kept() != began
    assert module.kept() == began
    assert module.meter.total == 0


def test_a_buffer_that_the_first_step_registers_is_forgotten():
    module = Metering()
    with trial(module, gradients=True):
        module.register_buffer("late", torch.zeros(3), persistent=False)
    assert not hasattr(module, "late")
    module.register_buffer("late", torch.zeros(3))
    assert "late" in module.state_dict()


def metered(strategy, world):
    module = Metering()
    batches = DataLoader([vectors(8, 0), vectors(8, 1)], batch_size=None)
    make_trainer(world, strategy, quiet=True, max_epochs=1, limit_val_batches=0).fit(module, batches)
    return module.kept()


@pytest.mark.parametrize("axis", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_meters_count_each_sample_once(axis):
    (wanted,) = run(metered, None, 1, world=1)
    assert run(metered, {axis: 2}, 2, world=2)[-1] == wanted  # of a pipeline the last stage runs the step to its end


RUNS = SimpleNamespace(count=0, ahead=0)
"""A trial would put numbers of this file back."""


class Counting(MLP):
    """Its loss is no mean over samples, and it draws random numbers outside of its blocks: the most runs."""

    def training_step(self, batch, batch_idx):
        RUNS.count += 1
        loss = F.cross_entropy(self(F.dropout(batch["x"], 0.2)), batch["y"], weight=torch.tensor([0.1, 1.0, 10.0]))
        self.log("loss", loss)
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        RUNS.ahead = RUNS.ahead or RUNS.count


class Plain(Counting):
    """Its loss is a mean, and it draws nothing."""

    def training_step(self, batch, batch_idx):
        RUNS.count += 1
        return F.cross_entropy(self(batch["x"]), batch["y"])


def runs_ahead(kind, limit_val_batches, world, axes):
    RUNS.count = RUNS.ahead = 0
    module, batches = kind(), DataLoader([vectors(8, 0), vectors(8, 1)], batch_size=None)
    flags = {**QUIET, "limit_val_batches": limit_val_batches, "num_sanity_val_steps": 0}
    trainer = Trainer(**flags, max_epochs=1, devices=world, strategy=Strategy3D(quiet=True, **axes))
    trainer.fit(module, batches, batches)
    return RUNS.ahead


PIPELINE, BOTH = {"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("kind", "limit_val_batches", "world", "axes"),
    [(Counting, 1, 2, PIPELINE), (Counting, 0, 4, BOTH), (Plain, 1, 4, BOTH)],
    ids=["pipeline", "both", "both, with validation"],
)
def test_a_step_runs_at_most_eight_times_and_once_per_stage_before_training(kind, limit_val_batches, world, axes):
    for ahead in run(runs_ahead, kind, limit_val_batches, world, axes, world=world):
        assert 1 <= ahead <= 8 + 2  # a second step, and the full batch too, which the first step need not rehearse then
