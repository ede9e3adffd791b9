"""Modules on images, with batches of their own."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.base import Base
from tests.zoo.registry import member


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
