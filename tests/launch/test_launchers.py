"""Hydra's other launchers: joblib is refused with a remedy, submitit starts the processes of each job itself."""

import os
import stat
from itertools import product
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_3d import Strategy3D
from lightning_3d.errors import LayoutError
from lightning_3d.launch.submitit import FIRST_PORT, SubmititLocalEnvironment, joined
from tests.launch.sweeps import SCRIPT, assert_right, sweep

pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs hydra-submitit-launcher (the dev extra)")

FAKE = Path(__file__).parent / "fake_slurm"
TP2 = ["layout@trainer.strategy=tp2", "trainer.devices=2"]


@pytest.mark.long
def test_joblib_is_refused_for_jobs_of_several_processes(tmp_path):
    code, text, jobs = sweep(tmp_path, *TP2, "hydra/launcher=joblib", "hydra.launcher.n_jobs=1")
    assert code != 0
    assert "This job wants 2 processes, and hydra/launcher=joblib" in text
    assert "Use hydra/launcher=basic" in text
    assert not jobs


@pytest.mark.long
def test_submitit_starts_the_processes_of_a_job(tmp_path):
    code, text, jobs = sweep(tmp_path, *TP2, "+launcher=submitit_local")
    assert code == 0, text
    assert_right(jobs, {0: (2, [*TP2, "+launcher=submitit_local"])})


@pytest.mark.long
def test_jobs_of_different_sizes_and_one_that_fails_go_through_submitit(tmp_path):
    code, text, jobs = sweep(
        tmp_path, "layout@trainer.strategy=zero1,tp2", "trainer.devices=2,4", "+launcher=submitit_local", "fail_job=1"
    )
    assert code != 0
    assert "this job was made to fail" in text
    order = list(product(("zero1", "tp2"), (2, 4)))
    wanted = {
        number: (
            world,
            [f"layout@trainer.strategy={name}", f"trainer.devices={world}", "+launcher=submitit_local", "fail_job=1"],
        )
        for number, (name, world) in enumerate(order)
        if number != 1
    }
    assert jobs.keys() == wanted.keys()
    assert_right(jobs, wanted)


def test_each_job_is_submitted_with_the_sizes_of_its_own_trainer(monkeypatch):
    def submitted(self, job_overrides, first):
        if job_overrides[0] == ["trainer.devices=8"]:
            raise RuntimeError("job 2 failed")
        calls.append((first, self.params["tasks_per_node"], self.params["gpus_per_node"], self.params["nodes"]))
        return [first]

    calls = []
    overrides = ["+launcher=slurm", "trainer.devices=2,4,8", "+trainer.num_nodes=2"]
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(SCRIPT.parent), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=HydraContext(config_loader=hydra.config_loader, callbacks=Callbacks()),
            task_function=print,
            config=hydra.compose_config("config", overrides, run_mode=RunMode.MULTIRUN),
        )
        slurm = type(launcher).__base__  # as it was when ours was made: Hydra loads plugins anew
        assert slurm.__name__ == "SlurmLauncher"
        monkeypatch.setattr(slurm, "launch", submitted)
        jobs = [[f"trainer.devices={devices}", "+trainer.num_nodes=2", "+launcher=slurm"] for devices in (2, 4)]
        assert launcher.launch(jobs, 5) == [5, 6]
        assert sorted(calls) == [(5, 2, 2, 2), (6, 4, 4, 2)]
        with pytest.raises(RuntimeError, match="job 2 failed"):
            launcher.launch([["trainer.devices=8"], jobs[0]], 2)
    assert sorted(calls)[0] == (3, 2, 2, 2)


@pytest.fixture
def task(monkeypatch):
    """Stands for the second of four tasks."""
    for name, value in {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_GLOBALID": "1",
        "SUBMITIT_LOCAL_LOCALID": "1",
        "SUBMITIT_LOCAL_NTASKS": "4",
        "SUBMITIT_LOCAL_JOB_ID": "70001",
    }.items():
        monkeypatch.setenv(name, value)


def test_a_task_of_submitit_knows_its_place(task):
    environment = Strategy3D(cluster_environment=LightningEnvironment()).cluster_environment
    assert isinstance(environment, SubmititLocalEnvironment)
    assert environment.creates_processes_externally
    assert (environment.world_size(), environment.global_rank(), environment.local_rank()) == (4, 1, 1)
    assert environment.node_rank() == 0
    assert environment.main_port == FIRST_PORT + 10_001


def test_too_few_tasks_are_refused_before_anything_waits(task):
    SubmititLocalEnvironment().validate_settings(num_devices=4, num_nodes=1)
    with pytest.raises(
        LayoutError, match=r"started 4 tasks, and the Trainer wants 2 devices x 1 nodes\. Use \+launcher"
    ):
        SubmititLocalEnvironment().validate_settings(num_devices=2, num_nodes=1)


def test_without_submitit_the_environment_stays(task, monkeypatch):
    chosen = SubmititLocalEnvironment()
    assert joined(chosen) is chosen
    assert joined(None) is None
    monkeypatch.delenv("SUBMITIT_EXECUTOR")
    environment = LightningEnvironment()
    assert joined(environment) is environment


@pytest.mark.long
def test_the_slurm_recipe_asks_for_the_right_job_and_trains(tmp_path):
    """Slurm's own commands are played by scripts that start the tasks on this machine; all else is the real thing."""
    for script in FAKE.iterdir():
        assert script.stat().st_mode & stat.S_IXUSR
    code, text, jobs = sweep(
        tmp_path, *TP2, "+trainer.num_nodes=1", "+launcher=slurm", "hydra.launcher.gpus_per_node=null",
        PATH=f"{FAKE}:{os.environ['PATH']}", FAKE_SLURM=str(tmp_path / "slurm"),
    )  # fmt: skip
    assert code == 0, text
    asked = (tmp_path / "slurm" / "script").read_text()
    assert "#SBATCH --nodes=1" in asked
    assert "#SBATCH --ntasks-per-node=2" in asked
    assert_right(jobs, {0: (2, [*TP2, "+trainer.num_nodes=1", "+launcher=slurm"])})
