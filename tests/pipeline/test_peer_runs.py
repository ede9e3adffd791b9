"""Runs ahead of training that all peers would make are made by one of them."""

import os
import random
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_3d import Strategy3D
from lightning_3d.pipeline.loss_mean import random_sums
from lightning_3d.pipeline.peer_runs import PeerRuns, _owners
from tests.parity import QUIET
from tests.workers import WorkerError, run
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
    parts = random_sums(one) * 0.25 + random_sums(3 * one) * 0.25
    assert torch.allclose(parts, random_sums(one), atol=1e-4)


def _world():
    return int(os.environ["WORLD_SIZE"])


SEEN = []
"""Rows of each batch that a step ran on: no trial puts it back."""


class Counting(MLP):
    def training_step(self, batch, batch_idx):
        SEEN.append(len(batch["x"]))
        return F.cross_entropy(self(batch["x"]), batch["y"])


def _ahead(kind, strategy):
    SEEN.clear()
    data = DataLoader([vectors(8, seed) for seed in range(2)], batch_size=None)
    module = kind()
    Trainer(strategy=Strategy3D(**strategy), **{**QUIET, "max_steps": 1}, devices=_world()).fit(module, data)
    return list(SEEN)


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
    assert sum(seen.count(4) for seen in ranks) == 1  # two thirds of the other microbatches


class Gathering(MLP):
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch["x"]), batch["y"])
        return loss + 0 * self.all_gather(loss.detach()).sum()


@pytest.mark.parametrize("scope", ["auto", "batch"])
def test_a_gather_over_all_ranks_in_a_pipelined_step_is_refused(scope):
    began = time.monotonic()
    with pytest.raises(WorkerError, match="training_step asks for an all_gather"):
        run(_ahead, Gathering, {"pipeline_parallel_size": 2, "loss_scope": scope}, world=2)
    assert time.monotonic() - began < 60


def test_a_gather_over_all_ranks_works_with_tensor_ranks():
    run(_ahead, Gathering, {"tensor_parallel_size": 2}, world=2)


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


def _drawn(strategy):
    data = DataLoader([vectors(8, seed) for seed in range(2)], batch_size=None)
    module, made = OwnGenerators(), "auto" if strategy is None else Strategy3D(**strategy)
    Trainer(strategy=made, **{**QUIET, "max_epochs": 1}, devices=_world()).fit(module, data)
    return module.drawn


def test_generators_of_a_module_draw_what_they_do_on_one_device():
    (alone,) = run(_drawn, None, world=1)
    assert run(_drawn, {"tensor_parallel_size": 2}, world=2) == [alone, alone]


def test_generators_of_a_module_are_refused_under_a_pipeline():
    with pytest.raises(WorkerError, match="draws from a random generator of its own"):
        run(_drawn, {"pipeline_parallel_size": 2}, world=2)
