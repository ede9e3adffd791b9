"""Errors of steps that a layout cannot run name the remedy that works."""

import copy

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

from lightning_3d import Strategy3D
from lightning_3d.errors import UnsupportedError
from tests.parity import QUIET
from tests.workers import run
from tests.zoo.vectors import MLP


class Teacher(MLP):
    """A teacher follows the student by torch's functions on lists."""

    def __init__(self, hook):
        super().__init__()
        self.hook = hook
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    @torch.no_grad()
    def follow(self):
        torch._foreach_mul_(list(self.teacher.parameters()), 0.9)
        torch._foreach_add_(list(self.teacher.parameters()), list(self.net.parameters()), alpha=0.1)

    def training_step(self, batch, batch_idx):
        if not self.hook:
            self.follow()
        return super().training_step(batch, batch_idx) + self.teacher(batch[0]).mean() * 0

    def on_train_batch_start(self, batch, batch_idx):
        if self.hook:
            self.follow()


class GAN(MLP):
    """Two networks that are not called one after the other."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net, self.critic = nn.Linear(8, 1), nn.Linear(1, 1)


def fit(kind, arguments, strategy):
    trainer = Trainer(**{**QUIET, "devices": 2, "strategy": Strategy3D(quiet=True, **strategy), "max_steps": 2})
    try:
        trainer.fit(kind(*arguments))
    except UnsupportedError as error:
        return str(error)
    return None


def teacher(strategy, devices):
    torch.manual_seed(0)
    trainer = Trainer(**{**QUIET, "devices": devices, "max_steps": 2, **strategy()})
    trainer.fit(Teacher(False))
    return {name: value.double().norm() for name, value in trainer.strategy.lightning_module_state_dict().items()}


def zero_3():
    return {"strategy": Strategy3D(quiet=True, zero_stage=3)}


@pytest.mark.parametrize("strategy", [{"tensor_parallel_size": 2}, {"zero_stage": 2}])
def test_a_teacher_that_follows_in_the_step_is_sent_to_a_hook(strategy):
    for text in run(fit, Teacher, (False,), strategy, world=2):
        assert text is not None
        assert "on_train_batch_start or on_train_batch_end" in text
    assert run(fit, Teacher, (True,), strategy, world=2) == [None, None]


def test_a_teacher_that_follows_in_the_step_is_one_devices_under_zero_3():
    """Outside of blocks the step has shards, and each rank changes its own."""
    expected = run(teacher, dict, 1, world=1)[0]
    for found in run(teacher, zero_3, 2, world=2):
        torch.testing.assert_close(found, expected)


def test_a_gan_under_a_pipeline_gets_the_message_about_manual_optimization():
    for text in run(fit, GAN, (), {"pipeline_parallel_size": 2}, world=2):
        assert text is not None
        assert text.startswith("Manual optimization cannot run under a pipeline")
