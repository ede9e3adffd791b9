"""Modules on vectors and on images, with batches of their own."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.base import Base
from tests.zoo.registry import member


@member("tensor", "pipeline", "zero", because="A plain stack, with a scalar parameter and one that no loss reads.")
class MLP(Base):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(3, 3)

    def tensors(self):
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(self.samples, 8, generator=generator)
        return x, x.sum(1, keepdim=True).sin()

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self.net(x) * self.scale, y)


@member(
    "tensor",
    "pipeline",
    "zero",
    because="Batch norm and a Sequential of unlike layers: most users outside of language.",
)
class ConvNet(Base):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
            nn.Conv2d(4, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Flatten(), nn.Linear(72, 10),
        )  # fmt: skip

    def tensors(self):
        generator = torch.Generator().manual_seed(4)
        return (
            torch.randn(self.samples, 1, 8, 8, generator=generator),
            torch.randint(0, 10, (self.samples,), generator=generator),
        )

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)
