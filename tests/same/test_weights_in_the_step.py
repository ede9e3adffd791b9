"""Steps that compute with weights themselves train as on one device, or are refused with a remedy."""

import re

import pytest
import torch
from torch.nn import functional as F

from tests.parity import assert_parity, train
from tests.workers import WorkerError, run
from tests.zoo.vectors import MLP


class Penalized(MLP):
    """A sum over all weights in the step."""

    def loss(self, batch):
        return super().loss(batch) + 1e-2 * sum(parameter.square().sum() for parameter in self.parameters())


class Sliced(MLP):
    """Reads rows of a block's weight outside of the block."""

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self.net(x) * self.scale + F.linear(x, self.net[0].weight[:1]), y)


class Differentiated(MLP):
    """A gradient penalty."""

    def loss(self, batch):
        x, y = batch[0].clone().requires_grad_(), batch[1]
        out = self.net(x) * self.scale
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + slope.square().mean()


HERE = "tests.same.test_weights_in_the_step:"


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("Penalized", {"zero_stage": 0}),
        ("Penalized", {"zero_stage": 2}),
        ("Differentiated", {"zero_stage": 0}),
        ("Differentiated", {"tensor_parallel_size": 2}),
        ("Sliced", {"tensor_parallel_size": 2, "tensor_plan": {"net": "whole"}}),
    ],
)
def test_trains_as_on_one_device(name, strategy):
    assert_parity(HERE + name, 2, strategy)


def refused(name, strategy):
    train(HERE + name, 2, strategy, {}, {})


@pytest.mark.parametrize(
    ("name", "strategy", "says"),
    [
        ("Penalized", {"zero_stage": 3}, "UnsupportedError: training_step computes with sharded weights"),
        ("Penalized", {"tensor_parallel_size": 2}, "UnsupportedError: training_step computes with sharded weights"),
        ("Sliced", {"zero_stage": 3}, "UnsupportedError: training_step computes with sharded weights"),
        ("Sliced", {"tensor_parallel_size": 2}, 'tensor_plan={"name of the block": "whole"}'),
        ("Differentiated", {"zero_stage": 1}, "UnsupportedError: training_step differentiates through blocks"),
        ("Differentiated", {"zero_stage": 3}, "UnsupportedError: training_step differentiates through blocks"),
    ],
)
def test_what_needs_whole_weights_is_refused(name, strategy, says):
    with pytest.raises(WorkerError) as error:
        run(refused, name, strategy, world=2)
    assert len(re.findall(says, str(error.value))) == 2
