"""Errors of steps that a layout cannot run name the remedy that works."""

import copy
import itertools

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

from lightning_3d import Strategy3D
from lightning_3d.errors import UnsupportedError
from tests.parity import QUIET, assert_parity, in_turn, make_trainer
from tests.workers import run
from tests.zoo.plain import MLP


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


def assigned(teacher, student):
    for mine, new in zip(teacher.parameters(), student.parameters(), strict=True):
        mine.data = mine.data * 0.9 + new.data * 0.1


def added(teacher, student):
    for mine, new in zip(teacher.parameters(), student.parameters(), strict=True):
        mine.data.mul_(0.9).add_(new.data, alpha=0.1)


def drawn_near(teacher, student):
    with torch.no_grad():
        for mine, new in zip(teacher.parameters(), student.parameters(), strict=True):
            mine.lerp_(new, 0.1)


def in_lists(teacher, student):
    with torch.no_grad():
        torch._foreach_mul_(list(teacher.parameters()), 0.9)
        torch._foreach_add_(list(teacher.parameters()), list(student.parameters()), alpha=0.1)


def drawn_near_in_lists(teacher, student):
    with torch.no_grad():
        torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 0.1)


def loaded(teacher, student):
    old = teacher.state_dict()
    teacher.load_state_dict({name: 0.9 * old[name] + 0.1 * new for name, new in student.state_dict().items()})


class Follows(MLP):
    """A teacher whose result the loss depends on follows the student in a hook."""

    way, hook = "assigned", "on_train_batch_start"

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def loss(self, batch):
        return super().loss(batch) + (self.net(batch[0]) - self.teacher(batch[0])).square().mean()

    def follow(self):
        globals()[self.way](self.teacher, self.net)

    def on_train_batch_start(self, batch, batch_idx):
        if self.hook == "on_train_batch_start":
            self.follow()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.hook == "on_train_batch_end":
            self.follow()

    def on_before_zero_grad(self, optimizer):
        if self.hook == "on_before_zero_grad":
            self.follow()


WAYS = ("assigned", "added", "drawn_near", "in_lists", "drawn_near_in_lists", "loaded")
ONES = {"zero1": {"zero_stage": 1}, "zero3": {"zero_stage": 3}, "tensor": {"tensor_parallel_size": 2}}


def _hooked():
    for at, (way, layout) in enumerate(itertools.product(WAYS, ONES)):
        hook = ("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad")[
            at % 2 if way == "loaded" else at % 3
        ]
        short = layout == ("tensor" if way == "added" else "zero1")
        yield pytest.param(way, layout, hook, marks=() if short else pytest.mark.long, id=f"{way}-{layout}-{hook}")


@pytest.mark.parametrize(("way", "layout", "hook"), in_turn(_hooked(), 2))
def test_a_teacher_that_follows_in_a_hook_is_one_devices(way, layout, hook):
    assert_parity(f"{__name__}:Follows", 2, ONES[layout], attributes={"way": way, "hook": hook})


class GAN(MLP):
    """Two networks that are not called one after the other."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net, self.critic = nn.Linear(8, 1), nn.Linear(1, 1)


def fit(kind, arguments, strategy):
    trainer = make_trainer(2, strategy, quiet=True, max_steps=2)
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
