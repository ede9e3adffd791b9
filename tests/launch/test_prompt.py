"""Where there is no script to run again, processes are forked: at a prompt, in a notebook, in piped code."""

import os
import sys

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import distributed as dist

from lightning_3d import Strategy3D
from lightning_3d.launch import ScriptLauncher
from tests.parity import QUIET

TWO = [torch.device("cpu")] * 2


def test_one_process_at_a_prompt_trains_in_it(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    strategy = Strategy3D(cluster_environment=LightningEnvironment(), parallel_devices=TWO[:1])
    strategy._configure_launcher()
    assert isinstance(strategy.launcher, ScriptLauncher)


@pytest.mark.filterwarnings("ignore")
def test_one_process_leaves_the_environment_for_a_later_trainer(monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    before = dict(os.environ)
    Trainer(**QUIET, devices=1, max_steps=1, strategy=Strategy3D(quiet=True)).fit(BoringModel())
    dist.destroy_process_group()  # other tests of this process start their own
    assert dict(os.environ) == before


@pytest.mark.parametrize("name", ["", "-", "-c"])
def test_what_is_no_script_is_forked(monkeypatch, name):
    import __main__

    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(__main__, "__spec__", None)
    strategy = Strategy3D(cluster_environment=LightningEnvironment(), parallel_devices=TWO)
    strategy._configure_launcher()
    assert strategy.launcher._start_method == "fork"


def test_a_script_is_run_again(monkeypatch, tmp_path):
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    strategy = Strategy3D(cluster_environment=LightningEnvironment(), parallel_devices=TWO)
    strategy._configure_launcher()
    assert isinstance(strategy.launcher, ScriptLauncher)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    strategy._configure_launcher()
    assert not isinstance(strategy.launcher, ScriptLauncher)
