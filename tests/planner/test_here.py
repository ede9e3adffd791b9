import os
from types import SimpleNamespace

import pytest
import torch

from lightning_3d.errors import PlannerError
from lightning_3d.module.host_memory import machine_memory
from lightning_3d.tools.planner.choose import choose_layout
from lightning_3d.tools.planner.local_cluster import catalogue_name, cluster_here
from lightning_3d.tools.planner.profile_module import count_module
from tests.zoo.planned import TinyGPT

pytestmark = pytest.mark.usefixtures("no_user_files")


def test_processes_share_the_memory_of_a_cpu_machine():
    two, four = cluster_here("cpu", devices_per_node=2), cluster_here("cpu", devices_per_node=4, nodes=3)
    assert two.accelerator.memory_gb == 2 * four.accelerator.memory_gb
    assert two.accelerator.memory_gb * 2e9 == pytest.approx(machine_memory())
    assert four.devices == 12
    assert choose_layout(count_module(TinyGPT(), name="x"), two)[0].zero_stage == 1


def test_a_calibration_is_used(tmp_path):
    folder = tmp_path / "user" / "lightning-3d" / "hardware"
    folder.mkdir(parents=True)
    (folder / "this-machine.yaml").write_text("this-machine: {like: cpu, memory_gb_per_s: 123}\n")
    assert cluster_here("cpu", devices_per_node=2).accelerator.memory_gb_per_s == 123


@pytest.mark.parametrize(
    ("name", "entry"), [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA L40S", "l40s")]
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


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A100 80GB PCIe", "a100-80g"),
        ("Tesla V100-SXM2-16GB", "v100-16g"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx-2080ti"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA A10G", "a10g"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Quadro T400", None),
    ],
)
def test_entries_are_found_by_what_torch_calls_a_gpu(name, entry):
    assert catalogue_name(name) == entry


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
