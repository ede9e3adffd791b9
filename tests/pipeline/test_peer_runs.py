"""Runs ahead of training that all peers would make are made by one of them."""

import os
import random
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_3d import Strategy3D
from lightning_3d.pipeline.loss_mean import random_sums
from lightning_3d.pipeline.step_runs import PeerRuns, _owners
from tests.parity import QUIET, long, make_trainer
from tests.workers import WorkerError, on_ranks, run
from tests.zoo import batchless
from tests.zoo.batchless import MLP, vectors


def test_runs_are_divided_by_their_costs():
    assert _owners([8, 2, 4, 2], 1) == [0, 0, 0, 0]
    assert _owners([8, 2, 4, 2], 2) == [0, 1, 1, 1]
    assert _owners([8, 2, 4, 2], 4) == [0, 2, 1, 3]
    assert _owners([1, 4], 2) == [0, 1]  # the first run is made by the first peer, whatever it costs


def _divided():
    made = []

    def make(name):
        made.append(name)
        return name, torch.tensor([dist.get_rank()])

    runs = PeerRuns([dist.group.WORLD])
    first = runs.divide([lambda: make("a"), lambda: make("b"), lambda: make("c")], costs=[2, 1, 1])
    again = runs.divide([lambda: make("d")], costs=[1])
    runs.close()
    return made, [(name, int(rank)) for name, rank in first], [name for name, _ in again]


def test_each_run_is_made_once_and_later_ones_everywhere():
    for rank, (made, first, again) in enumerate(run(_divided, world=2, group=True)):
        assert made == (["a", "d"] if rank == 0 else ["b", "c", "d"])
        assert first == [("a", 0), ("b", 1), ("c", 1)]
        assert again == ["d"]


def _one_fails():
    runs, rank = PeerRuns([dist.group.WORLD]), dist.get_rank()

    def fail():
        if rank == 1:
            raise ValueError("here")
        return "made by the other"

    try:
        return runs.divide([lambda: "first", fail], costs=[1, 1])
    except ValueError:
        runs.close()
        return "failed"


def test_a_peer_that_fails_lets_the_others_make_its_runs():
    assert run(_one_fails, world=2, group=True) == [["first", "made by the other"], "failed"]


@pytest.mark.parametrize("shape", [(64,), (300, 70), (4, 9, 9, 300)])
def test_differences_of_random_sums_are_as_large_as_those_of_tensors(shape):
    torch.manual_seed(0)
    one = torch.randn(shape)
    for size in (1e-3, 1.0):
        columns = torch.ones(shape[:-1])[..., None] * torch.randn(shape[-1])  # the same in every row
        for change in (torch.randn(shape), columns, torch.eye(*shape) if len(shape) == 2 else torch.randn(shape)):
            found = (random_sums(one + size * change) - random_sums(one)).norm() / (size * change).norm()
            assert 0.5 < found < 1.7
    turned = torch.complex(one, torch.zeros(shape))
    assert (random_sums(turned + 1j) - random_sums(turned)).norm() > 0.3 * one.numel() ** 0.5
    parts = random_sums(one) * 0.25 + random_sums(3 * one) * 0.25
    assert torch.allclose(parts, random_sums(one), atol=1e-4)


def _world():
    return int(os.environ["WORLD_SIZE"])


SEEN = SimpleNamespace(rows=[])
"""With the rows of each batch that a step ran on. A trial would put a list of this file back."""


class Counting(MLP):
    def training_step(self, batch, batch_idx):
        SEEN.rows.append(len(batch["x"]))
        return F.cross_entropy(self(batch["x"]), batch["y"])


def _ahead(kind, strategy, rows=(8,)):
    SEEN.rows.clear()
    own = rows[dist.get_rank() % len(rows)] if len(rows) > 1 else rows[0]
    data = DataLoader([vectors(own, seed) for seed in range(2)], batch_size=None)
    module = kind()
    make_trainer(_world(), strategy, max_steps=1).fit(module, data)
    return list(SEEN.rows)


@pytest.mark.parametrize(
    ("strategy", "world"),
    [
        ({"pipeline_parallel_size": 2, "num_microbatches": 4}, 2),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "num_microbatches": 4}, 4),
    ],
    ids=str,
)
def test_one_peer_runs_the_full_batch(strategy, world):
    ranks = run(_ahead, Counting, strategy, world=world)
    assert [seen.count(8) for seen in ranks] == [1, *[0] * (world - 1)]
    # two thirds of the other microbatches; a second step only runs the first of these
    assert sum(seen.count(4) for seen in ranks) == 1


class Synchronizing(MLP):
    """Each call of `compute` sends a message to the data ranks."""

    def __init__(self):
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch["x"]), batch["y"])
        self.mean.update(loss.detach())
        self.log("mean", self.mean.compute())
        return loss


@pytest.mark.parametrize(
    ("strategy", "world", "rows"),
    [
        ({"pipeline_parallel_size": 2, "num_microbatches": 4}, 4, (4, 5)),
        long({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, 8, (8,)),
    ],
    ids=str,
)
def test_data_ranks_divide_alike(strategy, world, rows):
    run(_ahead, Synchronizing, strategy, rows, world=world, timeout=120, group=True)


class Branched(LightningModule):
    """Its last declared block is called first. The loss is that of tokens, of which samples have different numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(16, 8)
        nn.init.zeros_(self.head.bias)
        nn.init.normal_(self.head.weight, std=1e-6)  # all tokens have the same loss for now
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)) for _ in range(4))

    def training_step(self, batch, batch_idx):
        hidden, labels = batch
        beside = self.blocks[3](hidden).pow(2).mean()
        for block in self.blocks[:3]:
            hidden = hidden + block(hidden)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), ignore_index=-100) + beside

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@on_ranks(2, group=False)
def test_gradients_of_the_block_that_is_called_last_are_compared():
    hidden, labels = torch.randn(8, 6, 16), torch.randint(8, (8, 6))
    for row in range(8):
        labels[row, 1 if row < 2 else 6 if row < 6 else 3 :] = -100
    strategy = Strategy3D(pipeline_parallel_size=2, num_microbatches=4, loss_scope="microbatch")
    trainer = Trainer(strategy=strategy, **{**QUIET, "max_steps": 1}, devices=_world())
    with pytest.warns(UserWarning, match="it is no mean over samples") if os.environ["RANK"] == "0" else nullcontext():
        trainer.fit(Branched(), DataLoader([(hidden, labels)], batch_size=None))


class SharedGenerators(MLP):
    def __init__(self):
        super().__init__()
        self.generators = torch.default_generator, np.random.rand.__self__

    def training_step(self, batch, batch_idx):
        noise = torch.rand((), generator=self.generators[0])
        return F.cross_entropy(self(batch["x"]), batch["y"]) * (1 + 0 * noise)


def test_the_generators_that_all_code_shares_are_not_a_modules_own():
    run(_ahead, SharedGenerators, {"pipeline_parallel_size": 2}, world=2)


class OwnGenerators(MLP):
    def __init__(self):
        super().__init__()
        self.drawn = []
        self.generators = {"torch": torch.Generator().manual_seed(1), "python": random.Random(1)}
        self.numpy = np.random.default_rng(1)

    def training_step(self, batch, batch_idx):
        numbers = torch.rand((), generator=self.generators["torch"]).item(), self.generators["python"].random()
        self.drawn.append((*numbers, self.numpy.random()))
        return F.cross_entropy(self(batch["x"]), batch["y"]) * self.drawn[-1][0]


class DrawingBlock(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1 + batchless.NOISE.random())


class FileGenerators(OwnGenerators):
    """Draws from generators of a class, of this file, of a file that it uses, and of blocks' files."""

    of_class = torch.Generator()

    def __init__(self):
        super().__init__()
        self.generators = self.numpy = None
        self.second, self.third = DrawingBlock(12, 12), DrawingBlock(12, 12)
        FileGenerators.of_class.manual_seed(1)
        _OF_FILE.bit_generator.state = np.random.default_rng(2).bit_generator.state
        batchless.NOISE.seed(3)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch["x"]), batch["y"])
        self.drawn.append((torch.rand((), generator=self.of_class).item(), _OF_FILE.random(), batchless.NOISE.random()))
        return loss * self.drawn[-1][0]


_OF_FILE = np.random.default_rng(2)


def _drawn(strategy, kind=OwnGenerators):
    data = DataLoader([vectors(8, seed) for seed in range(2)], batch_size=None)
    module, made = kind(), "auto" if strategy is None else Strategy3D(**strategy)
    Trainer(strategy=made, **{**QUIET, "max_epochs": 1}, devices=_world()).fit(module, data)
    return module.drawn


@pytest.mark.parametrize("kind", [OwnGenerators, FileGenerators])
def test_generators_of_a_module_draw_what_they_do_on_one_device(kind):
    (alone,) = run(_drawn, None, kind, world=1)
    assert run(_drawn, {"tensor_parallel_size": 2}, kind, world=2) == [alone, alone]


@pytest.mark.parametrize("kind", [OwnGenerators, FileGenerators])
def test_generators_of_a_module_are_refused_under_a_pipeline(kind):
    with pytest.raises(WorkerError, match="draws from a random generator of its own"):
        run(_drawn, {"pipeline_parallel_size": 2}, kind, world=2)
