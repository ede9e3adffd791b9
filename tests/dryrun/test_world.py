"""What a script finds in a dry run."""

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

from lightning_3d.errors import ConfigurationError, PlannerError
from lightning_3d.extensions import simulating
from lightning_3d.tools.dryrun import in_world, parse_cluster
from lightning_3d.tools.dryrun.fake_device import FakeDevice
from tests.parity import QUIET, make_trainer


@pytest.mark.parametrize(
    ("text", "nodes", "devices", "name"),
    [("128x8xh100", 128, 8, "h100"), ("8xcpu", 8, 1, "cpu"), ("1024", 128, 8, "h100"), ("1x4xcpu", 1, 4, "cpu")],
)
def test_clusters_are_named_as_for_the_planner_or_counted(text, nodes, devices, name):
    cluster = parse_cluster(text)
    assert (cluster.nodes, cluster.devices_per_node, cluster.accelerator.name) == (nodes, devices, name)


def test_clusters_that_cannot_be_simulated_are_refused():
    with pytest.raises(ConfigurationError, match="up to 4096 ranks, and 5000 has 5000"):
        parse_cluster("5000")
    with pytest.raises(PlannerError, match="did you mean h100"):
        parse_cluster("8xh10")


def test_parameters_take_no_memory_and_ties_stay():
    with in_world(parse_cluster("8xcpu")):
        module = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False), nn.BatchNorm1d(10))
        module[1].weight = module[0].weight
        large = nn.Linear(20_000, 20_000)  # 1.6 GB
        before = large.weight
        large.half().to(torch.float64)
    assert module[1].weight is module[0].weight
    assert all(isinstance(parameter, FakeDevice.kind) for parameter in (*module.parameters(), *large.parameters()))
    assert large.weight is before and before.dtype is torch.float64 and large.weight.requires_grad
    assert not isinstance(module[2].running_mean, FakeDevice.kind)


def test_modules_are_ordinary_again_afterwards():
    with in_world(parse_cluster("8xcpu")):
        assert len(simulating) == 1
    assert simulating == []
    assert not isinstance(nn.Linear(2, 2).weight, FakeDevice.kind)
    assert Trainer(**QUIET, devices=1).world_size == 1


def test_a_trainer_finds_the_cluster_whatever_it_asks_for():
    with in_world(parse_cluster("128x8xh100")):
        trainer = make_trainer(2, {"tensor_parallel_size": 4}, accelerator="gpu", num_nodes=3)
    assert (trainer.world_size, trainer.num_nodes, trainer.num_devices) == (1024, 128, 8)
    assert trainer.strategy.layout.data_parallel_size == 256


def test_other_strategies_are_refused():
    with (
        in_world(parse_cluster("1x2xcpu")),
        pytest.raises(ConfigurationError, match="strategy=DDPStrategy: a dry run simulates Strategy3D only"),
    ):
        Trainer(**QUIET, strategy="ddp")
