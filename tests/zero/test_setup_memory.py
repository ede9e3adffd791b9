"""Memory of a rank while a module is placed, and after: by the operating system, over that before the module exists."""

import warnings

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d import Strategy3D
from lightning_3d.module.host_memory import return_freed_memory
from tests.parity import QUIET
from tests.workers import run


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tall(LightningModule):
    """101 MB in blocks of 8.4 MB."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(8, 512), nn.Linear(512, 4)
        self.blocks = nn.ModuleList(Block(512) for _ in range(12))

    def training_step(self, batch, batch_idx):
        x = self.first(batch[0])
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(16, 8)), batch_size=8)


def _resident(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))


def placed(strategy, world):
    """The peak and the rest when training starts, in sizes of the module."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    return_freed_memory()
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")  # VmHWM begins here
    before, found = _resident("VmRSS"), {}

    class Look(Callback):
        def on_train_start(self, trainer, module):
            found.update(peak=_resident("VmHWM") - before, after=_resident("VmRSS") - before)

    module = Tall()
    size = sum(parameter.nbytes for parameter in module.parameters())
    flags = {"devices": world, "strategy": Strategy3D(quiet=True, **strategy), "max_steps": 1, "limit_val_batches": 0}
    Trainer(**{**QUIET, **flags, "callbacks": [Look()]}).fit(module)
    return {name: amount / size for name, amount in found.items()}


@pytest.mark.parametrize(
    ("strategy", "share"),
    [({"zero_stage": 3}, 0.5), ({"tensor_parallel_size": 2}, 0.5), ({"pipeline_parallel_size": 2}, 0.5)],
)
def test_a_rank_frees_what_it_does_not_own(strategy, share):
    """The full module is there once, since its `__init__` builds it; then a rank has its share."""
    run(placed, strategy, 2, world=2)  # what is imported on the way does not count
    for rank, found in enumerate(run(placed, strategy, 2, world=2)):
        proves = (
            "tensor_parallel_size" in strategy and rank == 0
        )  # the plan of all is proven here, on copies of a block
        assert found["peak"] < (2.4 if proves else 1.9)
        assert found["after"] < share + 0.1
