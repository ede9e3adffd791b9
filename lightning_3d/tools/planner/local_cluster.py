"""The devices of this machine as a `Cluster`, for jobs that have started.

This file imports torch. The catalogue does not, so that `lightning-3d plan` starts quickly.
"""

import os
import re
import warnings
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType

import torch

from lightning_3d.errors import PlannerError
from lightning_3d.module.host_memory import machine_memory
from lightning_3d.optim.state_bytes import PRECISIONS
from lightning_3d.tools.planner.catalogue import CALIBRATED, Catalogue
from lightning_3d.tools.planner.hardware import Accelerator, Cluster

SERVER_CORES = 16
"""Cores of the machine that the catalogue calls `cpu`."""


def cluster_here(device_type: str, *, devices_per_node: int, nodes: int = 1) -> Cluster:
    """`nodes` machines like this one with `devices_per_node` devices (processes, on a CPU) each.

    Memory is this machine's own; rates come from a calibration of it, else from the catalogue.
    """
    if devices_per_node < 1 or nodes < 1:
        raise PlannerError(f"{nodes} nodes of {devices_per_node} devices are no cluster: give at least 1 of each.")
    accelerator = _gpu() if device_type == "cuda" else _cpu(devices_per_node)
    return Cluster(accelerator=accelerator, nodes=nodes, devices_per_node=devices_per_node)


def _gpu() -> Accelerator:
    catalogue, properties = Catalogue.load(), torch.cuda.get_device_properties(0)
    name = CALIBRATED if CALIBRATED in catalogue.names else catalogue_name(properties.name)
    if name is None:
        warnings.warn(
            f"{properties.name} is not in the catalogue, so a layout is chosen with the rates of an A10G."
            " `lightning-3d calibrate` measures yours.",
            stacklevel=2,
        )
        name = "a10g"
    return replace(catalogue.find(name), title=properties.name, memory_gb=properties.total_memory / 1e9)


def catalogue_name(gpu: str) -> str | None:
    """The catalogue's name for what torch calls a GPU, None where it has none: all its parts are words of the GPU."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"(\d)gb\b", r"\1g", gpu.lower()))
    known = {*words, *map("".join, pairwise(words))}  # RTX 2080 Ti is rtx-2080ti
    able = [name for name in Catalogue.load().names if known.issuperset(name.split("-"))]
    return max(able, key=len, default=None)


def device_peak(device: torch.device, precision: str) -> float | None:
    """FLOP/s of matrix products of `device`, where the catalogue has it."""
    if device.type != "cuda":
        return None
    name = catalogue_name(torch.cuda.get_device_name(device))
    return None if name is None else Catalogue.load().find(name).peak(PRECISIONS.get(precision, "32"))


def _cpu(processes: int) -> Accelerator:
    catalogue = Catalogue.load()
    device = catalogue.find(CALIBRATED) if CALIBRATED in catalogue.names else _part_of_a_server(processes)
    memory = machine_memory() / processes / 1e9
    return replace(device, memory_gb=memory, host_memory_gb=memory, reserved_gb=0.0)


def _part_of_a_server(processes: int) -> Accelerator:
    """The catalogue's `cpu` is a whole server: a process here has its share of this machine's cores."""
    server = Catalogue.load().find("cpu")
    share = (os.cpu_count() or 1) / SERVER_CORES / processes
    peaks = MappingProxyType({dtype: peak * share for dtype, peak in server.peak_tflops.items()})
    return replace(server, peak_tflops=peaks, memory_gb_per_s=server.memory_gb_per_s * share)
