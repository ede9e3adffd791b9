import pytest
import torch

from lightning_3d.cli import main
from lightning_3d.errors import PlannerError
from lightning_3d.planner import calibration, machine_speed
from lightning_3d.planner.catalogue import Catalogue
from lightning_3d.planner.profile_module import KernelCount
from lightning_3d.planner.step_time import USUAL_KERNELS
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.plan_module import plan_tensor
from tests.workers import run

RATES = {
    "fp32": 5e10, "bf16": 9e10, "product": 4e10, "weight": 6e9, "memory": 1e10, "update": 5e9, "link": 8e8,
    "added": 4e8, "host": 1e10, "fused": 2e10,
}  # fmt: skip
WAITS = {"launch": 5e-4, "sum": 1e-3, "loop": 8e-3, "shard": 2e-3, "stage": 3e-3}
MEASURED = {**RATES, **WAITS}


def test_the_slower_rank_counts_and_plans_use_the_entry(monkeypatch, tmp_path, capsys):
    slower = {name: value * (2 if name in WAITS else 0.5) for name, value in MEASURED.items()}
    monkeypatch.setattr(calibration, "_measure", lambda folder, world, cuda: [MEASURED, slower])
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["calibrate"]) == 0
    entry = Catalogue.load().find("this-machine")
    assert entry.peak("32") == 2.5e10
    assert entry.memory_gb_per_s == 5
    assert (entry.block_launch_us, entry.collective_us, entry.step_us) == (1000, 2000, 16000)
    assert (entry.shard_us, entry.stage_us) == (4000, 6000)
    assert (entry.update_gb_per_s, entry.shard_update_gb_per_s) == (2.5, 10)
    assert (entry.matrix_share, entry.weight_gb_per_s, entry.sum_gb_per_s) == (0.8, 3, 0.2)
    assert main(["plan", "gpt2", "--tokens", "1M", "--precision", "32", "--cluster", "2xthis-machine"]) == 0
    assert "this machine, measured" in capsys.readouterr().out


def test_products_above_the_measured_peak_are_the_peak(monkeypatch, tmp_path):
    monkeypatch.setattr(calibration, "_measure", lambda folder, world, cuda: [{**MEASURED, "product": 6e10}])
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["calibrate"]) == 0
    entry = Catalogue.load().find("this-machine")
    assert (entry.peak("32"), entry.matrix_share) == (6e10, 1.0)


def test_wrong_names_and_places(monkeypatch, tmp_path, capsys):
    assert main(["calibrate", "--name", "8 x"]) == 2
    assert "letters" in capsys.readouterr().err
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(PlannerError, match="cannot be written"):
        calibration.write_entry({"x": {}}, file / "x.yaml")


def test_measurements_of_one_process(monkeypatch, tmp_path):
    monkeypatch.setattr(machine_speed, "REPEATS", 1)
    monkeypatch.setattr(machine_speed, "COPY_BYTES", 1 << 20)
    monkeypatch.setattr(machine_speed, "DISK_BYTES", 1 << 20)
    cpu = torch.device("cpu")
    assert 1e6 < machine_speed.matrix_rate(cpu, torch.float32, 64) < 1e15
    assert 1e6 < machine_speed.memory_rate(cpu) < 1e14
    assert 1e-6 < machine_speed.launch_seconds(cpu) < 1
    assert 1e6 < machine_speed.update_rate(cpu) < 1e14
    assert all(1e5 < rate < 1e15 for rate in machine_speed.product_rates(16))
    assert machine_speed.disk_rate(tmp_path) > 1e3
    (seconds,) = run(
        calibration.step_seconds, 1, 2, world=1
    )  # in a process of its own: a Trainer leaves its address behind
    assert 1e-5 < seconds < 5


def test_the_modules_that_are_timed_are_what_the_planner_takes_them_for():
    block, tokens = machine_speed._TinyBlock(), torch.ones(1, 4, 8)
    with KernelCount() as count:
        block(tokens)
    assert count.kernels == USUAL_KERNELS
    chain = calibration._Chain(2)
    calls = record_calls(chain, lambda: chain.blocks[1](chain.blocks[0](calibration.some_rows())))
    assert len(plan_tensor(chain, 2, calls=calls).splits) == 6, "both matrices of both blocks, and the first's bias"


@pytest.mark.long
def test_two_processes_measure_this_machine(tmp_path):
    ranks = calibration._measure(str(tmp_path), world=2, cuda=False)
    assert len(ranks) == 2
    assert all(rank[name] > 0 for rank in ranks for name in MEASURED)
