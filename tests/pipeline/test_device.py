"""Code that asks a module's parameters for their device gets the rank's, also where another stage holds them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.parity import assert_parity
from tests.zoo.base import Base


class Asking(Base):
    """Makes positions on the device of its first parameter, and a mask on that of a block's buffer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 1)

    def tensors(self):
        x = torch.randn(self.samples, 8, generator=torch.Generator().manual_seed(1))
        return x, x.sum(1, keepdim=True).sin()

    @property
    def first_device(self):
        return next(self.blocks.parameters()).device

    def loss(self, batch):
        x, y = batch
        assert {p.device for p in self.parameters()} == {x.device} == {b.device for b in self.buffers()}
        last = self.blocks[-1][1].running_mean
        x = x + torch.arange(8, device=self.first_device) * torch.full((8,), 0.1, device=last.device)
        for block in self.blocks:
            x = block(x + torch.ones(8, device=self.first_device))
        return F.mse_loss(self.head(x), y) + torch.zeros((), device=self.first_device)

    def on_train_batch_start(self, batch, batch_idx):
        assert torch.ones(3, device=self.first_device).sum() == 3
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.6, 0.6)
        assert torch.ones(3, device=next(self.head.parameters()).device).sum() == 3


@pytest.mark.parametrize("strategy", [{"loss_scope": "batch"}, {"num_microbatches": 1, "schedule": "gpipe"}])
def test_the_device_of_parameters_of_other_stages_is_the_ranks(strategy):
    assert_parity(
        "tests.pipeline.test_device:Asking", 2,
        {"data_parallel_size": 1, "pipeline_parallel_size": 2, "quiet": True, "num_microbatches": 1, **strategy},
    )  # fmt: skip
