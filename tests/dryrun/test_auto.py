"""A dry run of a layout that is chosen, and of a run that would go on from an earlier one."""

import pytest
import torch
from lightning.pytorch import Trainer
from torch import nn

from lightning_3d import Strategy3D
from lightning_3d.tools.dryrun import in_world, parse_cluster
from tests.dryrun.compare import FLAGS
from tests.zoo.vectors import MLP


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
