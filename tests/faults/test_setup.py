"""An error of one rank alone, at any moment of set-up: all ranks end in time, and each has the text of that error."""

import os
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_3d import Strategy3D
from lightning_3d.errors import UnsupportedError
from lightning_3d.ranks import agreement, talk
from tests.faults.squad import squad
from tests.parity import QUIET
from tests.zoo.sized import Residual

LAYOUTS = {
    "zero": {"zero_stage": 3},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "3d": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "zero_stage": 1},
}
PATIENCE, LIMIT, TIMEOUT = 1.0, 10.0, 4.0
TEXT = "planted here: use another seed"


class Moments:
    """Counts the moments of set-up that the user's code sees, and raises at one of them."""

    seen, of_set_up, at, error = 0, 0, None, UnsupportedError

    @classmethod
    def pass_by(cls):
        cls.seen += 1
        if cls.seen - 1 == cls.at:
            cls.stop()
            raise cls.error(TEXT)

    @staticmethod
    def stop():
        """What the rank does before it raises."""


class Block(Residual):
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
        sys.setprofile(None)


class FirstCalls:
    """The first call of each function of the package in the main thread is a moment too, once ranks have met."""

    def __init__(self):
        self.known = set()

    def __call__(self, frame, event, argument):
        code = frame.f_code
        if event != "call" or code in self.known or "/lightning_3d/" not in code.co_filename:
            return
        self.known.add(code)
        if dist.is_initialized() and not any(part in code.co_filename for part in BEYOND):
            Moments.pass_by()


BEYOND = tuple(f"/lightning_3d/{part}/" for part in ("faults", "ranks", "launch"))
"""Code that handles the error itself, and where all ranks start."""


def train(rank, layout, victim, at, error, folder, everywhere=False):
    """How a fit ends on this rank: the text of its error, or None; the seconds it took; the moments of its set-up. First
    calls of the package's functions count `everywhere`, beside those that the user's code sees."""
    seed_everything(1, verbose=False)
    agreement.PATIENCE = talk.PATIENCE_AFTER_ERROR = PATIENCE
    strategy = Strategy3D(**LAYOUTS[layout], timeout=30.0, quiet=True)
    flags = {**QUIET, "max_steps": 1, "limit_val_batches": 0, "default_root_dir": folder}
    trainer = Trainer(**flags, devices=_world(layout), strategy=strategy)
    Moments.seen, Moments.at, Moments.error = 0, at if rank == victim else None, error
    began, text = time.monotonic(), None
    sys.setprofile(FirstCalls() if everywhere else None)
    try:
        trainer.fit(Net())
    except Exception as found:
        if "combined_loader" in str(found):  # Lightning's teardown fails too where a loader's __iter__ has
            found = found.__context__
        text = f"{type(found).__name__}: {found}"  # the process ends, and with it the connections of this rank
    finally:
        sys.setprofile(None)
    return text, time.monotonic() - began, Moments.of_set_up


def _world(layout):
    return 4 if layout == "3d" else 2


def ends(layout, victim, at, error, folder, everywhere=False):
    """What `train` returned on each rank, each a process that then ends, by rank. A rank that is missing was killed."""
    given = layout, victim, at, error, str(folder), everywhere
    with squad(train, *given, world=_world(layout), folder=folder / "ended") as job:
        assert job.wait(60) == []
        return [job.ended.get(rank, {}).get("returned") for rank in range(_world(layout))]


def check(layout, victim, at, error, folder, everywhere=False):
    """True where the planted error ended the run. Some are harmless: what they break is only looked at ahead."""
    found = ends(layout, victim, at, error, folder, everywhere)
    where = f"{layout}, rank {victim}, moment {at}, {error.__name__}: {found}"
    assert all(found), where
    texts, seconds, _ = zip(*found, strict=True)
    assert max(seconds) < LIMIT, where
    assert len({text is None for text in texts}) == 1, where
    assert all(text is None or TEXT in text for text in texts), where
    return texts[0] is not None


IN_REHEARSAL = ((36, 0), (40, 1), (43, 1))
"""Moments between and inside of blocks, each on one rank."""


@pytest.mark.parametrize(("at", "victim"), IN_REHEARSAL)
def test_an_error_in_the_rehearsal_ends_all_ranks(tmp_path, at, victim):
    assert check("pipeline", victim, at, UnsupportedError, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_error_at_any_moment_of_set_up_ends_all_ranks(tmp_path, layout, everywhere):
    """Moments that the user's code sees, then first calls of the package's own functions."""
    moments = max(moments for _, _, moments in ends(layout, -1, None, ValueError, tmp_path, everywhere))
    ended = 0
    for number, at in enumerate(range(1, moments, max(1, moments // 40))):
        victim, error = number % _world(layout), (UnsupportedError, KeyError)[number // 2 % 2]
        ended += check(layout, victim, at, error, tmp_path, everywhere)
    assert ended


def hang(rank, layout, victim, at, how, folder):
    """A fit in which one rank stops or hangs at a moment of set-up."""
    Moments.stop = lambda: os.kill(os.getpid(), signal.SIGSTOP) if how == "stop" else time.sleep(1000)
    strategy = Strategy3D(**LAYOUTS[layout], timeout=TIMEOUT, quiet=True)
    Moments.at = at if rank == victim else None
    flags = {**QUIET, "max_steps": 1, "limit_val_batches": 0, "default_root_dir": folder}
    Trainer(**flags, devices=_world(layout), strategy=strategy).fit(Net())


def _hanging(layout, at, how, long=True):
    return pytest.param(layout, at, how, marks=pytest.mark.long if long else ())


@pytest.mark.parametrize(
    ("layout", "at", "how"),
    [
        _hanging("pipeline", 7, "hang", long=False),
        *[_hanging("pipeline", at, how) for at in (7, 25, 45) for how in ("hang", "stop")],
        *[_hanging("3d", at, how) for at in (7, 16, 25) for how in ("hang", "stop")],  # peers divide the runs
    ],
)
def test_survivors_name_a_rank_that_stops_in_the_runs_ahead_of_training(tmp_path, layout, at, how):
    world, victim = _world(layout), 1
    survivors = [rank for rank in range(world) if rank != victim]
    with squad(hang, layout, victim, at, how, str(tmp_path), world=world, folder=tmp_path / "ended") as job:
        assert job.wait(60, survivors) == []
        ended = job.ended
    for rank in survivors:
        assert ended[rank]["raised"] == "PeerError", ended
        assert f"ank {victim} (" in ended[rank]["text"], ended
        assert ended[rank]["seconds"] < TIMEOUT + 3 * LIMIT, ended
