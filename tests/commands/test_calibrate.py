import pytest
import torch

from lightning_3d.cli import main
from lightning_3d.errors import PlannerError
from lightning_3d.tools.commands import calibrate
from lightning_3d.tools.planner.catalogue import Catalogue

MEASURED = {"fp32": 5e10, "bf16": 9e10, "memory": 1e10, "kernels": 1e5, "link": 8e8, "host": 1e10, "ratio": 1.1}


@pytest.fixture(autouse=True)
def no_user_files(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "DISK_BYTES", 1 << 20)


def measuring(monkeypatch, *ranks):
    monkeypatch.setattr(calibrate, "_measure", lambda folder, world, cuda: list(ranks))


def test_the_slower_rank_counts_and_plans_use_the_entry(monkeypatch, capsys):
    measuring(monkeypatch, MEASURED, {**{name: rate / 2 for name, rate in MEASURED.items()}, "ratio": 1.2})
    assert main(["calibrate"]) == 0
    assert capsys.readouterr().err == ""
    entry = Catalogue.load().find("this-machine")
    assert (entry.peak("32"), entry.memory_gb_per_s, entry.node_link_gb_per_s) == (2.5e10, 5, 0.4)
    assert entry.block_launch_us == 600  # 30 kernels of 20 microseconds
    assert main(["plan", "gpt2", "--tokens", "1M", "--precision", "32", "--cluster", "2xthis-machine"]) == 0
    assert "this machine, measured" in capsys.readouterr().out


def test_figures_of_a_busy_machine_contradict_each_other(monkeypatch, capsys):
    measuring(monkeypatch, MEASURED, {**MEASURED, "ratio": 1.8})
    assert main(["calibrate"]) == 0
    assert "took 1.8 times as long in one of two measurements" in capsys.readouterr().err


def test_wrong_names_and_places(tmp_path, capsys):
    assert main(["calibrate", "--name", "8 x"]) == 2
    assert "letters" in capsys.readouterr().err
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(PlannerError, match="cannot be written"):
        calibrate.write_entry({"x": {}}, file / "x.yaml")


def test_measurements_of_one_process(monkeypatch, tmp_path):
    monkeypatch.setattr(calibrate, "REPEATS", 1)
    monkeypatch.setattr(calibrate, "COPY_BYTES", 1 << 20)
    cpu = torch.device("cpu")
    assert 1e6 < calibrate.matrix_rate(cpu, torch.float32, 64) < 1e15
    assert 1e6 < calibrate.memory_rate(cpu) < 1e14
    assert 1e3 < calibrate.kernel_rate(cpu) < 1e8
    assert calibrate.disk_rate(tmp_path) > 1e3


@pytest.mark.long
def test_two_processes_measure_this_machine(tmp_path):
    ranks = calibrate._measure(str(tmp_path), world=2, cuda=False)
    assert len(ranks) == 2
    assert all(rank[name] > 0 for rank in ranks for name in MEASURED)
