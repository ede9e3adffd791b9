"""Parameters that FSDP2 cannot shard are replicated, and train as on one device."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_3d.zero.shard_units import unshardable
from tests.parity import assert_parity
from tests.zoo.vectors import MLP


class Odd(MLP):
    """Has weights whose gradients are sparse, and one with no elements."""

    def __init__(self):
        super().__init__()
        self.table, self.bag = nn.Embedding(20, 8, sparse=True), nn.EmbeddingBag(20, 8, sparse=True)
        self.nothing = nn.Parameter(torch.empty(0))

    def loss(self, batch):
        x, y = batch
        ids = (x.abs() * 5).long().clamp(max=19)
        x = x + self.table(ids).sum(1) + self.bag(ids) + self.nothing.sum()
        return F.mse_loss(self.net(x) * self.scale, y)

    def on_after_backward(self):
        for parameter in self.parameters():  # of sparse ones torch has no norm, which is compared
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_why():
    module = Odd()
    assert {name: unshardable([module]).get(parameter) for name, parameter in module.named_parameters()} == {
        **dict.fromkeys(name for name, _ in module.named_parameters()),
        "scale": "it is a scalar",
        "nothing": "it has no elements",
        "table.weight": "its gradients are sparse",
        "bag.weight": "its gradients are sparse",
    }


@pytest.mark.parametrize("stage", [1, 3])
def test_they_train_as_on_one_device(stage):
    assert_parity("tests.zero.test_units:Odd", 2, {"zero_stage": stage})
