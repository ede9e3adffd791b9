"""Mixtures whose experts are called with routes, on simulated owners."""

import pytest
import torch
from torch import nn

from lightning_3d.errors import UnsupportedError
from lightning_3d.experts.expert_forward import make_layers
from lightning_3d.experts.prove_experts import plan_experts
from lightning_3d.module.forward import add_layer
from lightning_3d.module.undo import UndoStack
from lightning_3d.tensor.geometry import local_part
from lightning_3d.tensor.scratch import shard_copy
from lightning_3d.tensor.simulate import run_shards

EXPERTS, WIDTH = 4, 8


class Experts(nn.Module):
    """Called with an argument more than Hugging Face's. It fails without tokens."""

    def __init__(self, experts=EXPERTS, capacity=0):
        super().__init__()
        self.count, self.width, self.capacity = experts, experts, capacity
        self.up = nn.Parameter(torch.randn(experts, 6, WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(experts, WIDTH, 6) * 0.3)

    def forward(self, hidden, index, weights, scale=1.0, bias=None):
        assert int(index.max()) < self.count
        result = torch.zeros_like(hidden)
        for expert in range(self.count):
            token, choice = torch.where(index == expert)
            if self.capacity:
                token, choice = token[: self.capacity], choice[: self.capacity]
            inner = torch.relu(hidden[token] @ self.up[expert].T) @ self.down[expert].T
            result = result.index_add(0, token, inner * weights[token, choice, None])
        return result * scale


class Mixture(nn.Module):
    def __init__(self, only=EXPERTS, **given):
        super().__init__()
        self.router, self.experts, self.only, self.given = nn.Linear(WIDTH, EXPERTS), Experts(), only, given

    def forward(self, x):
        weights, index = self.router(x).softmax(-1)[:, : self.only].topk(2, -1)
        return self.experts(x, index, weights, **self.given)


def on_two_owners(mixture):
    """The results of both ranks, each with tokens of its own, and what one device computes for these."""
    plan = plan_experts(mixture, 2)
    tokens = [torch.randn(5, WIDTH), torch.randn(7, WIDTH)]

    def compute(axis):
        splits = plan.splits

        def local(name, value):
            return local_part(value, splits[name], axis.rank).clone() if name in splits else value.clone()

        twin = shard_copy(mixture, local)
        for layer in make_layers(twin.experts, plan.modules["experts"], axis):
            add_layer(layer, UndoStack())
        return twin(tokens[axis.rank]).detach()

    return run_shards(2, compute), [mixture(each).detach() for each in tokens]


@pytest.mark.parametrize("mixture", [{"scale": 2.5}, {"only": 2}], ids=["another argument", "a rank without tokens"])
def test_owners_compute_what_one_device_does(mixture):
    torch.manual_seed(0)
    for found, wanted in zip(*on_two_owners(Mixture(**mixture)), strict=True):
        torch.testing.assert_close(found, wanted)


def test_another_tensor_is_refused():
    with pytest.raises(UnsupportedError, match="would not travel with the tokens"):
        on_two_owners(Mixture(bias=torch.ones(WIDTH)))


def test_a_proof_holds_for_equal_attributes_alone():
    layers = nn.ModuleList(Mixture() for _ in range(2))
    layers[1].experts.capacity = 2
    with pytest.warns(UserWarning, match=r"The experts of 1\.experts stay on every data rank"):
        assert list(plan_experts(layers, 2).modules) == ["0.experts"]


def test_an_attribute_that_is_the_width_stays():
    """`width` and `count` are equal, and one of them is the number of experts."""
    (experts,) = plan_experts(Mixture(), 2).modules.values()
    assert experts.numbers in (("count",), ("count", "width"))
