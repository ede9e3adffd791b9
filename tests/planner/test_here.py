import os
from types import SimpleNamespace

import pytest
import torch

from lightning_3d.errors import PlannerError
from lightning_3d.planner.catalogue import Catalogue
from lightning_3d.planner.choose import choose_layout
from lightning_3d.planner.hardware import Cluster
from lightning_3d.planner.local_cluster import _GPU_NAMES, cluster_here, machine_memory
from lightning_3d.planner.profile_module import count_module
from tests.zoo.planned import TinyGPT


@pytest.fixture(autouse=True)
def no_user_files(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def test_processes_share_the_memory_of_a_cpu_machine():
    two, four = cluster_here("cpu", devices_per_node=2), cluster_here("cpu", devices_per_node=4, nodes=3)
    assert two.accelerator.memory_gb == 2 * four.accelerator.memory_gb
    assert two.accelerator.memory_gb * 2e9 == pytest.approx(machine_memory())
    assert four.devices == 12
    assert choose_layout(count_module(TinyGPT(), name="x"), two)[0].zero_stage == 1


def test_a_calibration_is_used(tmp_path):
    folder = tmp_path / "lightning-3d" / "hardware"
    folder.mkdir(parents=True)
    (folder / "this-machine.yaml").write_text("this-machine: {like: cpu, memory_gb_per_s: 123}\n")
    assert cluster_here("cpu", devices_per_node=2).accelerator.memory_gb_per_s == 123


@pytest.mark.parametrize(
    ("name", "entry"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA L40S", "l40s")],
)
def test_gpus_are_known_by_name_and_keep_their_own_memory(monkeypatch, name, entry):
    properties = SimpleNamespace(name=name, total_memory=85e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    device = cluster_here("cuda", devices_per_node=8).accelerator
    assert (device.name, device.memory_gb, device.title) == (entry, 85, name)


def test_an_unknown_gpu_is_said_so(monkeypatch):
    properties = SimpleNamespace(name="Something New", total_memory=85e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    with pytest.warns(UserWarning, match="Something New is not in the catalogue"):
        assert cluster_here("cuda", devices_per_node=8).accelerator.memory_gb == 85


def test_every_gpu_name_is_in_the_catalogue():
    assert set(_GPU_NAMES.values()) <= set(Catalogue.load().names)


def test_no_devices():
    with pytest.raises(PlannerError, match="no cluster"):
        cluster_here("cpu", devices_per_node=0)


def test_a_container_has_the_memory_that_it_is_given(tmp_path):
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = tmp_path / "memory.max"
    for said, memory in (("1000000", 1000000), ("max", physical), (str(2 * physical), physical)):
        limit.write_text(f"{said}\n")
        assert machine_memory(limit) == memory
    assert machine_memory(tmp_path / "none") == physical


def test_more_processes_than_cores_share_them():
    machine = Catalogue.load().find("cpu", cores=2)
    assert [Cluster(accelerator=machine, nodes=1, devices_per_node=n).crowd for n in (1, 2, 4)] == [1, 1, 2]
    assert Catalogue.load().cluster("1x16xh100").crowd == 1


def test_a_core_is_quicker_while_the_others_rest():
    machine = Catalogue.load().find("cpu", cores=4, alone=1.6)
    crowds = [Cluster(accelerator=machine, nodes=1, devices_per_node=n).crowd for n in (1, 2, 4, 8)]
    assert crowds == pytest.approx([1 / 1.6, 1 / 1.4, 1, 2])
