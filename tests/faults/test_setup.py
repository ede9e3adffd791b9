"""An error of one rank alone, at any moment of set-up: all ranks end in time, and each has the text of that error."""

import time
import warnings

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_3d import Strategy3D
from lightning_3d.errors import UnsupportedError
from lightning_3d.ranks import agreement, talk
from tests.parity import QUIET
from tests.workers import run

LAYOUTS = {
    "zero": {"zero_stage": 3},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "3d": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "zero_stage": 1},
}
PATIENCE, LIMIT = 1.0, 10.0
TEXT = "planted here: use another seed"


class Moments:
    """Counts the moments of set-up that the user's code sees, and raises at one of them."""

    seen, of_set_up, at, error = 0, 0, None, UnsupportedError

    @classmethod
    def pass_by(cls):
        cls.seen += 1
        if cls.seen - 1 == cls.at:
            raise cls.error(TEXT)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        Moments.pass_by()
        x = x + self.down(self.up(x).tanh())
        Moments.pass_by()
        return x


class Data(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        if index == 0:
            Moments.pass_by()
        return torch.full((8,), index / 16.0)


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def setup(self, stage):
        Moments.pass_by()

    def training_step(self, batch, index):
        Moments.pass_by()
        x = batch
        for block in self.blocks:
            x = block(x)
            Moments.pass_by()
        return x.square().mean()

    def configure_optimizers(self):
        Moments.pass_by()
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(Data(), batch_size=8)

    def on_train_batch_start(self, batch, index):
        Moments.at, Moments.of_set_up = None, Moments.seen


def train(layout, victim, at, error, folder):
    """How a fit ends on this rank: the text of its error, or None; the seconds it took; the moments of its set-up."""
    warnings.simplefilter("ignore")
    seed_everything(1, verbose=False)
    agreement.PATIENCE = talk.PATIENCE_AFTER_ERROR = PATIENCE
    strategy = Strategy3D(**LAYOUTS[layout], timeout=30.0, quiet=True)
    flags = {**QUIET, "max_steps": 1, "limit_val_batches": 0, "default_root_dir": folder}
    trainer = Trainer(**flags, devices=_world(layout), strategy=strategy)
    Moments.seen, Moments.at, Moments.error = 0, at if trainer.global_rank == victim else None, error
    began, text = time.monotonic(), None
    try:
        trainer.fit(Net())
    except Exception as found:
        text = f"{type(found).__name__}: {found}"
    return text, time.monotonic() - began, Moments.of_set_up


def _world(layout):
    return 4 if layout == "3d" else 2


def check(layout, victim, at, error, folder):
    """True where the planted error ended the run. Some are harmless: what they break is only looked at ahead."""
    found = run(train, layout, victim, at, error, folder, world=_world(layout), timeout=60)
    texts, seconds, _ = zip(*found, strict=True)
    where = f"{layout}, rank {victim}, moment {at}, {error.__name__}: {found}"
    assert max(seconds) < LIMIT, where
    assert len({text is None for text in texts}) == 1, where
    assert all(text is None or TEXT in text for text in texts), where
    return texts[0] is not None


def _moments(layout, folder):
    return max(seen for _, _, seen in run(train, layout, -1, None, ValueError, folder, world=_world(layout)))


@pytest.mark.parametrize("layout", [pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS])
def test_an_error_at_each_moment_of_set_up_ends_all_ranks(tmp_path, layout):
    moments = _moments(layout, str(tmp_path))
    for at in range(0, moments, max(1, moments // 24)):
        for victim in range(_world(layout)):
            error = (UnsupportedError, KeyError)[(at + victim) % 2]
            check(layout, victim, at, error, str(tmp_path))
