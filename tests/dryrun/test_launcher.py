"""`Strategy3D(dry_run=...)`: the report of a job that would fail, of a chosen layout, and of a run that would go on."""

import gc
import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from torch import distributed as dist
from torch import nn
from torch.distributed import TCPStore

from lightning_3d import Strategy3D
from lightning_3d.errors import ConfigurationError, PlannerError, RunError
from lightning_3d.extensions import simulating
from lightning_3d.layout import Layout
from lightning_3d.ranks.process_groups_private import existing_groups
from lightning_3d.tools.dryrun import in_world, parse_cluster
from lightning_3d.tools.dryrun.fake_device import FakeDevice
from lightning_3d.tools.dryrun.simulation import usual_ranks
from tests.dryrun.compare import FLAGS, dry
from tests.parity import QUIET, make_trainer
from tests.zoo.plain import MLP


class Failing(MLP):
    def training_step(self, batch, batch_idx):
        raise OSError("the disk is full")


class Branching(MLP):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if loss > 100:
            raise AssertionError("a branch on a value that is not there takes the way of false")
        return loss


def test_a_number_of_ranks_is_a_cluster():
    assert Strategy3D(dry_run=8)._dry_run.world.cluster == Strategy3D(dry_run="8")._dry_run.world.cluster


def test_a_strategy_alone_prints_the_report_and_leaves_the_module_alone(capfd):
    module = MLP()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    trainer = Trainer(**{**FLAGS, "accelerator": "gpu", "devices": 3}, strategy=Strategy3D(dry_run="1x8xcpu"))
    assert trainer.fit(module) is None
    said = capfd.readouterr().out
    assert "Dry run on 1x8xcpu (8 ranks): data 8 x tensor 1 x pipeline 1, ZeRO 1" in said
    assert "reduce_scatter" in said
    torch.testing.assert_close(module.state_dict(), before)
    assert not any(isinstance(parameter, FakeDevice.kind) for parameter in module.parameters())
    other = Trainer(**FLAGS, devices=1)
    assert other.world_size == 1  # only the Trainer with that strategy was dry
    with pytest.warns(UserWarning, match=r"trainer\.validate is skipped"):
        assert trainer.validate(module) == []


def test_a_strategy_alone_fails_where_the_job_would(capfd):
    trainer = Trainer(**FLAGS, strategy=Strategy3D(dry_run="1x6xcpu", tensor_parallel_size=4))
    with pytest.raises(RunError, match="6 ranks cannot be split into tensor_parallel_size=4"):
        trainer.fit(MLP())
    assert "LayoutError" in capfd.readouterr().out


def test_a_process_that_trains_by_itself_is_simulated_and_keeps_its_group():
    started = not dist.is_initialized()  # another test of this process may have trained
    if started:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dry("MLP", "1x4xcpu", {"zero_stage": 1}).errors == ()
        one = torch.ones(())
        dist.all_reduce(one)
        assert one == dist.get_world_size()
    finally:
        if started:
            dist.destroy_process_group()


@pytest.mark.filterwarnings("default")
def test_groups_of_an_earlier_run_do_not_end_in_a_simulated_rank():
    """They would wait for threads that a fork does not have. One that was destroyed lives while anything knows it."""
    ours = not dist.is_initialized()
    Trainer(**FLAGS, strategy=Strategy3D(zero_stage=1)).fit(MLP())
    groups = existing_groups()
    if ours:
        dist.destroy_process_group()
    assert groups
    del groups
    assert dry("MLP", "1x4xcpu", {"zero_stage": 1, "pipeline_parallel_size": 2}).errors == ()


def test_a_store_in_the_garbage_of_this_process_does_not_end_a_simulated_rank():
    """The end of a store waits for its thread, which a fork does not have. Automatic collections are off here."""
    gc.collect()
    gc.disable()
    try:
        garbage = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
        garbage.append(garbage)
        del garbage
        report = dry("MLP", "1x1xh100", {})
    finally:
        gc.enable()
    assert [rank.error for rank in report.ranks] == [None]


def test_one_rank_of_each_stage_the_middle_of_each_axis_and_the_last_are_simulated():
    report = dry("GPT", "1x8xh100", {"pipeline_parallel_size": 2, "num_microbatches": 2})
    assert [rank.rank for rank in report.ranks] == [0, 2, 4, 7]
    wide = Layout(data_parallel_size=16, tensor_parallel_size=8, pipeline_parallel_size=2)
    assert [str(wide.coordinate(rank)) for rank in usual_ranks(wide)] == [
        "pipeline 0, data 0, tensor 0",
        "pipeline 0, data 0, tensor 4",
        "pipeline 0, data 8, tensor 0",
        "pipeline 1, data 0, tensor 0",
        "pipeline 1, data 15, tensor 7",
    ]
    assert report.errors == ()
    sent = {(row.axis, row.collective): row for row in report.ranks[0].sent}
    assert sent["pipeline_parallel", "send"].bytes > 0
    assert json.loads(json.dumps(report.data()))["ranks"][2]["where"] == "pipeline 1, data 0, tensor 0"


class Uneven(MLP):
    def training_step(self, batch, batch_idx):
        dist.all_reduce(torch.ones(1))  # every rank
        self.all_gather(torch.ones(1))
        if self.global_rank == self.trainer.world_size - 1:
            dist.all_reduce(torch.ones(1))  # the last only
        return super().training_step(batch, batch_idx)


class Even(MLP):
    def training_step(self, batch, batch_idx):
        if self.global_rank:
            dist.all_reduce(torch.ones(1))
        else:
            dist.all_reduce(torch.zeros(1))
        self.all_gather(torch.ones(1))
        dist.barrier()
        return super().training_step(batch, batch_idx)


class LastFails(MLP):
    def training_step(self, batch, batch_idx):
        if self.global_rank == self.trainer.world_size - 1:
            raise OSError("the disk is full")
        return super().training_step(batch, batch_idx)


def test_a_collective_that_only_some_ranks_reach_is_an_error_with_its_line():
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "# the last only" in text)
    report = dry("tests.dryrun.test_launcher:Uneven", "1x4xcpu", {"zero_stage": 1})
    (error,) = report.errors
    assert error.startswith(f"{__file__}:{line}: allreduce of 4 ranks is reached by rank 3 and not by ranks 0, 2.")
    assert dry("tests.dryrun.test_launcher:Even", "1x4xcpu", {"zero_stage": 1}).errors == ()


def test_an_error_of_one_rank_names_it():
    report = dry("tests.dryrun.test_launcher:LastFails", "1x4xcpu", {"zero_stage": 1})
    assert report.errors == ("rank 3 (pipeline 0, data 3, tensor 0): OSError: the disk is full",)


class Trained(MLP):
    """Its backward fails as it does in the fork of a process that has trained on a card."""

    def training_step(self, batch, batch_idx):
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing.")


def test_a_process_that_has_trained_on_a_card_is_sent_to_a_new_one():
    report = dry("tests.dryrun.test_launcher:Trained", "1x2xcpu", {"zero_stage": 1})
    assert report.errors[0].endswith("start the dry run in a new process.")


def test_what_does_not_fit_is_an_error():
    cluster = parse_cluster("1x2xk80")
    with in_world(cluster) as world:
        module = MLP()
        module.large = torch.nn.Linear(60_000, 60_000)  # 14.4 GB
        module.loss = lambda batch: MLP.loss(module, batch) + module.large.bias.sum() + module.large.weight[0].sum()
        Trainer(**FLAGS, strategy=Strategy3D(zero_stage=0)).fit(module)
        (report,) = world.reports
    assert any("does not fit" in error and "in a training step" in error for error in report.errors)
    assert "a k80 has 10.5 GB for tensors" in report.errors[0]


def test_errors_of_the_step_and_branches_on_values_are_reported():
    failing = dry("tests.dryrun.test_launcher:Failing", "1x2xcpu", {})
    assert failing.errors == ("OSError: the disk is full",)
    assert "Traceback" in failing.ranks[0].log
    branching = dry("tests.dryrun.test_launcher:Branching", "1x2xcpu", {})
    assert branching.errors == ()
    assert any("test_launcher.py:" in text for text in branching.warnings)


def test_a_pipeline_that_cannot_be_cut_is_reported():
    report = dry("GPT", "1x4xcpu", {"pipeline_parallel_size": 2, "pipeline_split": ["nothing"]})
    assert len(report.errors) == 1  # all ranks say the same
    assert "PipelineSplitError" in report.errors[0]


class Wide(MLP):
    """Blocks of 0.4 GB: with gradients and Adam's states more than a small device has."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(10_000, 10_000) for _ in range(12)))

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss + self.blocks(torch.ones(len(batch[0]), 10_000)).mean()


def test_every_stage_of_the_chosen_layout_is_simulated():
    with in_world(parse_cluster("1x4xk80")) as world:
        strategy = Strategy3D(layout="auto", tensor_parallel_size=1, zero_stage=1)
        Trainer(**FLAGS, strategy=strategy).fit(Wide())
        (report,) = world.reports
    assert [rank.error for rank in report.ranks] == [None] * len(report.ranks)
    firsts = [rank for rank in report.ranks if "data 0" in rank.where]
    stages = len(firsts)
    assert stages > 1, "four devices of 10.5 GB do not hold it whole"
    assert f"pipeline {stages}" in report.layout
    assert [rank.rank for rank in firsts] == [stage * 4 // stages for stage in range(stages)]
    assert [rank.where for rank in firsts] == [f"pipeline {at}, data 0, tensor 0" for at in range(stages)]
    assert report.chosen.startswith(f"layout: {report.layout}")
    assert "1x4xk80" in report.chosen, "not the machine that simulates"
    assert report.chosen in str(report)


def test_a_run_is_neither_found_nor_left(tmp_path):
    flags = {**FLAGS, "default_root_dir": tmp_path, "enable_checkpointing": True}
    strategy = Strategy3D(resume="auto", layout="auto", dry_run="1x2xcpu")
    with pytest.warns(UserWarning, match="resume='auto' is ignored in a dry run"):
        Trainer(**flags, strategy=strategy).fit(MLP())
    assert list(tmp_path.rglob("*")) == []


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
