"""The line about memory counts the states that the optimizer at hand will have."""

import re

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import distributed as dist
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d import Strategy3D
from lightning_3d.layout import Layout
from lightning_3d.optim.probe import states_per_parameter_byte
from lightning_3d.parallel.state_counts import expected_states
from lightning_3d.strategy.banner import memory_line
from tests.parity import QUIET, silent
from tests.workers import run

OPTIMIZERS = {
    "SGD": lambda given: optim.SGD(given, lr=0.1),
    "momentum": lambda given: optim.SGD(given, lr=0.1, momentum=0.9),
    "Adam": lambda given: optim.Adam(given),
    "amsgrad": lambda given: optim.AdamW(given, amsgrad=True),
    "RMSprop": lambda given: optim.RMSprop(given, centered=True, momentum=0.1),
}


class OfItsOwn(optim.Optimizer):
    """Counts on parameters of its own shape."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.view(16, 40))


def _states(optimizer):
    """Bytes of states that a real step leaves, but for step counts."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    values = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return sum(value.nbytes for value in values if value.ndim)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_are_those_of_a_real_step(name):
    module = nn.Sequential(nn.Linear(16, 40), nn.Linear(40, 2))
    optimizer = OPTIMIZERS[name](module.parameters())
    (expected,) = expected_states(module, Layout(), None, None)
    before = torch.get_rng_state()
    counted = states_per_parameter_byte([optimizer])
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), before)
    assert counted * expected.optimizer == _states(optimizer)


def test_groups_and_optimizers_count_by_their_parameters():
    large, small = nn.Linear(100, 30, bias=False), nn.Linear(10, 100, bias=False)
    assert states_per_parameter_byte([optim.Adam(large.parameters()), optim.SGD(small.parameters())]) == 1.5
    groups = [{"params": large.parameters(), "momentum": 0.9}, {"params": small.parameters()}]
    assert states_per_parameter_byte([optim.SGD(groups, lr=0.1)]) == 0.75


def test_an_optimizer_that_cannot_be_tried_is_not_counted():
    module = nn.Linear(40, 16, bias=False)
    optimizers = [OfItsOwn(module.parameters())]
    kept = states_per_parameter_byte(optimizers)
    said = memory_line(expected_states(module, Layout(), None, None), optimizers, kept)
    assert said.endswith("(2.56 KB weights + 2.56 KB gradients), and what OfItsOwn keeps, and activations")


class Net(LightningModule):
    def __init__(self, kind):
        super().__init__()
        self.net, self.kind = nn.Linear(100, 10, bias=False), kind

    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return OPTIMIZERS[self.kind](self.parameters())


@pytest.mark.parametrize(("kind", "said"), [("SGD", ""), ("momentum", " + 4 KB SGD"), ("Adam", " + 8 KB Adam")])
def test_fit_says_the_states_of_its_optimizer(kind, said, monkeypatch):
    printed = []
    monkeypatch.setattr("lightning_3d.strategy.fit_report.rank_zero_info", printed.append)
    data = DataLoader(TensorDataset(torch.zeros(4, 100)), batch_size=2)
    with silent():
        Trainer(**QUIET, devices=1, max_steps=1, strategy=Strategy3D(zero_stage=0)).fit(Net(kind), data)
    dist.destroy_process_group()  # other tests of this process start their own
    lines = [line for line in printed if "memory of a rank" in line]
    assert len(lines) == 1
    assert re.search(r"\(4 KB weights \+ 4 KB gradients(.*)\), and activations", lines[0])[1] == said


class Counted(optim.SGD):
    steps = 0

    def step(self, closure=None):
        type(self).steps += 1
        return super().step(closure)


class FromTheStart(Callback):
    def on_train_start(self, *_):
        Counted.steps = 0


class Counts(Net):
    def configure_optimizers(self):
        return Counted(self.parameters(), lr=0.1)


def steps_of_two_epochs():
    data = DataLoader(TensorDataset(torch.zeros(8, 100)), batch_size=2)
    flags = {**QUIET, "devices": 2, "max_epochs": 2, "max_steps": -1, "callbacks": [FromTheStart()]}
    trainer = Trainer(**flags, strategy=Strategy3D(timeout=60))
    trainer.fit(Counts("SGD"), data)
    return Counted.steps, trainer.global_step


def test_no_copy_of_an_optimizer_steps_once_training_has_started():
    """A user who counts steps from `on_train_start` on counts the real ones."""
    assert run(steps_of_two_epochs, world=2) == [(8, 8), (8, 8)]
