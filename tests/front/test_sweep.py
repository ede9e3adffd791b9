"""A Hydra sweep over layouts and numbers of processes, as a user starts it: one command, in a process of its own."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from lightning.pytorch.plugins.environments import LightningEnvironment

from lightning_3d import Strategy3D
from lightning_3d.errors import ConfigurationError
from lightning_3d.launch.hydra_job import child_command
from lightning_3d.launch.script import ScriptLauncher

SCRIPT = Path(__file__).parent / "sweep" / "train.py"
ROOT = Path(__file__).parents[2]


def sweep(folder, *overrides):
    """Exit code, output, and what each rank of each job wrote."""
    environment = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "WORLD_SIZE", "RANK")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(SCRIPT), "-m", *overrides, "hydra.sweep.dir=out"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    jobs = defaultdict(list)
    for file in (folder / "out").glob("*/seen.jsonl"):
        jobs[int(file.parent.name)] = [json.loads(line) for line in file.read_text().splitlines()]
    return done.returncode, done.stdout + done.stderr, jobs


def assert_right(jobs, wanted):
    """Each job ran once on each of its own ranks, with its own parameters, in one directory, and learned the same."""
    for number, (world, overrides) in wanted.items():
        ranks = jobs[number]
        assert sorted(seen["rank"] for seen in ranks) == list(range(world)), (number, ranks)
        for seen in ranks:
            assert seen["world"] == world
            assert seen["job"] == number
            assert seen["overrides"] == overrides
            assert seen["losses"] == pytest.approx(ranks[0]["losses"])
    losses = [jobs[number][0]["losses"] for number in wanted]
    assert all(loss == pytest.approx(losses[0]) for loss in losses)


def test_a_failed_job_does_not_harm_the_next(tmp_path):
    code, text, jobs = sweep(tmp_path, "fail_on=1,-1", "layout@trainer.strategy=zero1", "trainer.devices=2")
    assert code != 0
    assert "this job was made to fail" in text
    assert jobs.keys() == {1}
    assert_right(jobs, {1: (2, ["fail_on=-1", "layout@trainer.strategy=zero1", "trainer.devices=2"])})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.long
def test_every_job_has_its_own_world_directory_and_parameters(tmp_path):
    code, text, jobs = sweep(tmp_path, "layout@trainer.strategy=zero1,tp2", "trainer.devices=2,4")
    assert code == 0, text
    order = [("zero1", 2), ("zero1", 4), ("tp2", 2), ("tp2", 4)]
    wanted = {
        number: (world, [f"layout@trainer.strategy={name}", f"trainer.devices={world}"])
        for number, (name, world) in enumerate(order)
    }
    assert_right(jobs, wanted)
    assert {seen["layout"] for seen in jobs[3]} == {"data 2 x tensor 2 x pipeline 1, ZeRO 1"}
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0", "1", "2", "3", "multirun.yaml"]


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


def test_launchers_that_run_jobs_side_by_side_are_refused(job):
    job("trainer.devices=2", launcher="joblib")
    with pytest.raises(
        ConfigurationError, match=r"wants 2 processes, and hydra/launcher=joblib .*hydra/launcher=basic"
    ):
        ScriptLauncher(LightningEnvironment(), 2, 1)
    ScriptLauncher(LightningEnvironment(), 1, 1)


def test_strategy3d_starts_its_processes_so():
    strategy = Strategy3D(cluster_environment=LightningEnvironment())
    strategy._configure_launcher()
    assert isinstance(strategy.launcher, ScriptLauncher)
