"""Ray Train on this machine: its workers train like one device, and continue after one of them is killed."""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from lightning_3d import Strategy3D
from lightning_3d.errors import UnsupportedError
from lightning_3d.strategy.checks import check_reports
from tests.docs.pages import ROOT
from tests.launch.ray_job import EPOCHS, train
from tests.workers import run


def started(command, folder):
    """The output of `command`. Its processes end with it, also after a timeout."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_TRAIN_V2_ENABLED": "1"}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        environment.pop(name, None)
    job = subprocess.Popen(
        command, cwd=folder, env=environment, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = job.communicate(timeout=900)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 0, output[-6000:]
    return output


@pytest.mark.long
@pytest.mark.parametrize(
    ("workers", "strategy"),
    [
        (8, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "zero_stage": 1}),
        (2, {"zero_stage": 3, "resume": "auto", "checkpoint_format": "sharded"}),
    ],
    ids=["checkpoints of Ray", "checkpoints of Lightning"],
)
def test_workers_train_like_one_device_and_continue_after_one_was_killed(workers, strategy, tmp_path):
    pytest.importorskip("ray.train", reason="needs ray (the ray extra)")
    config = json.dumps({"workers": workers, "strategy": strategy})
    started([sys.executable, "-m", "tests.launch.ray_job", str(tmp_path), config], ROOT)
    assert (tmp_path / "killed").exists()
    (alone,) = run(train, str(tmp_path), None, world=1, timeout=120)
    steps = len(alone["losses"]) // EPOCHS
    for rank in range(workers):
        found = torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True)
        assert found["world"] == workers
        began = min(found["losses"]) - 1
        assert steps <= began <= 2 * steps  # Ray may not know the last checkpoint yet when the worker dies
        assert [*found["losses"]] == [*alone["losses"]][began:]
        wanted = {step: alone["losses"][step] for step in found["losses"]}
        torch.testing.assert_close(found["losses"], wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found["weights"], alone["weights"], rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_the_check_of_prepare_trainer_is_all_that_it_does():
    """docs/nodes.md says to leave it out."""
    lightning = pytest.importorskip("ray.train.lightning", reason="needs ray (the ray extra)")
    with pytest.raises(RuntimeError, match="Invalid strategy class"):
        lightning.prepare_trainer(SimpleNamespace(strategy=Strategy3D()))
    trainer = SimpleNamespace(strategy=lightning.RayDDPStrategy())
    before = {name: id(value) for name, value in vars(trainer.strategy).items()}
    assert lightning.prepare_trainer(trainer) is trainer
    assert [*vars(trainer)] == ["strategy"]
    assert {name: id(value) for name, value in vars(trainer.strategy).items()} == before


@pytest.mark.long
def test_the_example_trains(tmp_path):
    pytest.importorskip("ray.train", reason="needs ray (the ray extra)")
    command = [sys.executable, str(ROOT / "examples" / "ray_train.py"), "--workers", "4", "--epochs", "1"]
    output = started([*command, "--bytes", "40000", "--storage", str(tmp_path / "results")], tmp_path)
    assert "\nloss " in output


class RayTrainReportCallback:
    """Has the name of Ray's."""


class Mine(RayTrainReportCallback):
    """One that extends it."""


def test_a_checkpoint_that_is_still_written_is_not_uploaded():
    check_reports([Mine()], asynchronous=False)
    check_reports([object()], asynchronous=True)
    with pytest.raises(UnsupportedError, match=r"Mine uploads a checkpoint .* Use async_checkpoint=False"):
        check_reports([Mine()], asynchronous=True)
