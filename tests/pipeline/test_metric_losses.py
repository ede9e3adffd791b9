"""A loss that a metric computes has its gradient under a pipeline."""

from functools import partial

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanSquaredError, Metric, MetricCollection
from torchmetrics.regression import CosineSimilarity

from tests.parity import check


class SquaredError(Metric):
    """The loss of a library whose losses are metrics."""

    is_differentiable, full_state_update = True, False

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, prediction, target):
        self.total = self.total + (prediction - target).square().sum()
        self.count = self.count + target.numel()

    def compute(self):
        return self.total / self.count


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(6, 3)
        self.criterion, self.mse = SquaredError(), MeanSquaredError()
        self.similarity = CosineSimilarity(reduction="mean")
        self.both = MetricCollection({"a": MeanSquaredError(), "b": SquaredError()})

    def training_step(self, batch, index):
        prediction = self.head(self.blocks(batch["x"]))
        loss = self.loss(prediction, batch["y"])
        self.log("loss", loss)
        return {"loss": loss}

    def validation_step(self, batch, index):
        return F.mse_loss(self.head(self.blocks(batch["x"])), batch["y"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Alone(Net):
    def loss(self, prediction, target):
        return self.criterion(prediction, target)


class Term(Net):
    def loss(self, prediction, target):
        return F.l1_loss(prediction, target) + 0.3 * (1 - self.similarity(prediction, target))


class Collected(Net):
    def loss(self, prediction, target):
        values = self.both(prediction, target)
        return values["a"] + 0.5 * values["b"]


class Logged(Net):
    """A metric whose value is only logged, as most are."""

    def loss(self, prediction, target):
        self.log("mse", self.mse(prediction, target))
        return F.mse_loss(prediction, target)


def build(kind):
    torch.manual_seed(1)
    module = kind()
    data = torch.Generator().manual_seed(2)
    return module, [{"x": torch.randn(8, 6, generator=data), "y": torch.randn(8, 3, generator=data)} for _ in range(5)]


@pytest.mark.parametrize("kind", [Alone, Term, Collected, Logged])
def test_a_loss_of_metrics_trains_as_on_one_device(kind):
    check(partial(build, kind), 2, {"num_microbatches": 4})
