"""A module that is built in parts is planned and proven with the memory of a block, however many blocks it has."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d.sandbox import build_recorder
from tests.dryrun.compare import dry
from tests.parity import long

WIDTH, ROWS = 256, 1024
BLOCK = 8 * WIDTH * WIDTH
"""Parameters."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Few(LightningModule):
    count = 4

    def configure_model(self):
        if not hasattr(self, "blocks"):
            self.blocks = nn.ModuleList(Block() for _ in range(self.count))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        for block in self.blocks:
            x = block(x)
        return x.float().pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(4 * ROWS, WIDTH)), batch_size=ROWS)


class Many(Few):
    count = 24


@pytest.mark.parametrize("precision", [long("32-true"), "bf16-mixed"])
def test_memory_before_training_does_not_grow_with_the_blocks(precision, monkeypatch):
    monkeypatch.setattr(build_recorder, "ROOM", 4 * BLOCK)
    above = []
    for name in ("Few", "Many"):
        strategy = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2}
        report = dry(f"tests.dryrun.test_setup_peak:{name}", "1x4xcpu", strategy, {"precision": precision}, [0])
        (rank,) = report.ranks
        assert rank.error is None
        above.append(rank.setup_peak - rank.parameters)
    assert above[1] <= above[0], "besides its shards"
