"""A Hydra sweep over layouts and numbers of processes, as a user starts it: one command, in a process of its own."""

import os
import sys
from itertools import product

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_3d import Strategy3D
from lightning_3d.cli import main
from lightning_3d.errors import ConfigurationError
from lightning_3d.launch.hydra_job import child_command
from lightning_3d.launch.launchers import ScriptLauncher
from tests.launch.sweeps import SCRIPT, assert_right, sweep

LAYOUTS = ("zero0", "zero1", "zero2", "zero3", "tp2", "pp2")
WORLDS = (2, 4, 6)


def test_a_failed_job_does_not_harm_the_next(tmp_path, capsys):
    code, text, jobs = sweep(tmp_path, "layout@trainer.strategy=zero1,pp2", "trainer.devices=2", "fail_job=0")
    assert code != 0
    assert "this job was made to fail" in text
    assert jobs.keys() == {1}
    assert_right(jobs, {1: (2, ["layout@trainer.strategy=pp2", "trainer.devices=2", "fail_job=0"])})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "flight_before",
        "out",
    ]  # the record of the failed job, moved by the next
    assert main(["compare", str(tmp_path / "out")]) == 0
    failed, ended, why = capsys.readouterr().out.splitlines()[1:]
    assert failed.split() == ["0", "did", "not", "finish", *["-"] * 9, "layout@trainer.strategy=zero1"]
    assert why == "job 0 did not finish: RuntimeError: this job was made to fail"
    assert "The job failed on rank 0" in next((tmp_path / "out" / "0").glob("*.log")).read_text()
    assert "data 1 x tensor 1 x pipeline 2, ZeRO 1" in ended
    assert f"{jobs[1][0]['losses'][-1]:.6g}" in ended


@pytest.mark.long
def test_six_layouts_and_three_worlds_train_the_same(tmp_path):
    code, text, jobs = sweep(
        tmp_path, f"layout@trainer.strategy={','.join(LAYOUTS)}", f"trainer.devices={','.join(map(str, WORLDS))}"
    )
    assert code == 0, text
    order = list(product(LAYOUTS, WORLDS))
    assert_right(
        jobs,
        {
            number: (world, [f"layout@trainer.strategy={name}", f"trainer.devices={world}"])
            for number, (name, world) in enumerate(order)
        },
    )
    layouts = [{seen["layout"] for seen in jobs[number]} for number in range(len(order))]
    assert layouts[order.index(("tp2", 6))] == {"data 3 x tensor 2 x pipeline 1, ZeRO 1"}
    assert layouts[order.index(("pp2", 4))] == {"data 2 x tensor 1 x pipeline 2, ZeRO 1"}
    assert len(set(map(str, layouts))) == len(order)
    assert len({home.parent for home in (tmp_path / "out").glob("*/lightning_3d.json")}) == len(order)
    folders = {path.name for path in (tmp_path / "out").iterdir()}
    assert folders == {*map(str, range(len(order))), "multirun.yaml"}


@pytest.mark.long
def test_of_six_layouts_one_fails_and_five_are_unaffected(tmp_path):
    code, text, jobs = sweep(
        tmp_path, f"layout@trainer.strategy={','.join(LAYOUTS)}", "trainer.devices=2", "fail_job=2"
    )
    assert code != 0
    assert "this job was made to fail" in text
    wanted = {
        number: (2, [f"layout@trainer.strategy={name}", "trainer.devices=2", "fail_job=2"])
        for number, name in enumerate(LAYOUTS)
        if number != 2
    }
    assert jobs.keys() == wanted.keys()
    assert_right(jobs, wanted)


@pytest.fixture
def job(tmp_path):
    """Stands for a Hydra job that runs in this process."""

    def start(*overrides, launcher="basic"):
        config = compose("config", list(overrides), return_hydra_config=True)
        config.hydra.runtime.output_dir = str(tmp_path / "it's $here")
        config.hydra.runtime.choices["hydra/launcher"] = launcher
        config.hydra.job.num, config.hydra.job.id = 3, "3"
        HydraConfig.instance().set_config(config)

    GlobalHydra.instance().clear()
    with initialize_config_dir(str(SCRIPT.parent), version_base="1.3"):
        yield start
    HydraConfig.instance().cfg = None


def test_a_child_is_a_single_run_of_the_job(job, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["train.py", "-m", "-cn", "other", "lr=1,2", "--config-dir=more"])
    job("lr=2", "+name='a b=c'", "hydra.mode=MULTIRUN", "hydra.sweep.dir=x", "hydra.verbose=true")
    command, directory = child_command(["python", "train.py"], local_rank=2)
    assert directory == os.getcwd()
    assert command[:4] == ["python", "train.py", "--config-name=other", "--config-dir=more"]
    overrides = OverridesParser.create().parse_overrides(command[4:])
    said = {override.key_or_group: override.value() for override in overrides}
    assert said.pop("hydra.job_logging.handlers.file.filename").endswith("_rank2.log")
    directory = str(tmp_path / "it's $here")
    assert {str(value) for value in (said.pop("name"), said.pop("hydra.run.dir"))} == {"a b=c", directory}
    assert said.pop("hydra.job.id") == "3"
    assert said == {
        "lr": 2,
        "hydra.verbose": True,
        "hydra.mode": "RUN",
        "hydra.output_subdir": None,
        "hydra.job.num": 3,
    }


def _unguarded(function):
    return function()


def test_launchers_that_run_jobs_side_by_side_are_refused(job):
    job("trainer.devices=2", launcher="joblib")
    with pytest.raises(
        ConfigurationError, match=r"wants 2 processes, and hydra/launcher=joblib .*hydra/launcher=basic"
    ):
        ScriptLauncher(LightningEnvironment(), 2, 1, _unguarded)
    ScriptLauncher(LightningEnvironment(), 1, 1, _unguarded)


def test_strategy3d_starts_its_processes_so(monkeypatch):
    monkeypatch.setattr(sys, "argv", [__file__])  # as a script is; tests may be run by something without a file
    strategy = Strategy3D(cluster_environment=LightningEnvironment())
    strategy._configure_launcher()
    assert isinstance(strategy.launcher, ScriptLauncher)
