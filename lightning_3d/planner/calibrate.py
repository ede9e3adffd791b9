"""Measuring this machine with one process per device at once, as a training would use it, into a catalogue entry."""

import os
import tempfile
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from omegaconf import OmegaConf

from lightning_3d.errors import PlannerError
from lightning_3d.planner import measure
from lightning_3d.planner.engine import engine_seconds
from lightning_3d.planner.here import machine_memory

TIMEOUT = 120
"""Seconds after which a measurement is given up."""
WAITS = {
    "launch": "block_launch_us", "sum": "collective_us", "loop": "step_us", "shard": "shard_us", "stage": "stage_us"
}  # fmt: skip
"""What is measured as seconds; the rest are rates."""
CORES = {"weight": "weight_gb_per_s", "added": "sum_gb_per_s", "fused": "shard_update_gb_per_s"}
"""What is measured only where devices are cores."""
WIDTH = 384
"""Of a module that one would train on a core."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def calibrate(name: str) -> dict[str, Any]:
    """A catalogue entry called `name` for this machine: a device is a GPU, or one CPU core where there is none."""
    cuda = torch.cuda.is_available()
    devices = torch.cuda.device_count() if cuda else os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        ranks = _measure(folder, world=min(2, devices), cuda=cuda)
    slowest = {key: (max if key in WAITS else min)(rank[key] for rank in ranks) for key in ranks[0]}
    if "product" in slowest:  # on a busy machine the small ones may be the quicker: no share of a peak is above 1
        slowest["fp32"] = max(slowest["fp32"], slowest["product"])
    memory, host = _memory(cuda, devices)
    peaks = {dtype: _round(slowest[dtype] / 1e12) for dtype in DTYPES}
    return {
        name: {
            "title": f"this machine, measured {date.today()} ({'GPU' if cuda else 'one process per CPU core'})",
            "memory_gb": _round(memory / 1e9),
            "peak_tflops": peaks,
            "matrix_share": _round(slowest["product"] / slowest["fp32"]) if "product" in slowest else 1.0,
            "memory_gb_per_s": _round(slowest["memory"] / 1e9),
            "update_gb_per_s": _round(slowest["update"] / 1e9),
            "cores": 0 if cuda else devices,
            "devices_per_node": devices,
            "node_link_gb_per_s": _round(slowest["link"] / 1e9),
            "cluster_link_gb_per_s": _round(slowest["link"] / 1e9),
            "link_share": 1.0,
            **{field: _round(slowest[key] / 1e9) for key, field in CORES.items() if key in slowest},
            "alone": _round(slowest.get("alone", 1.0)),
            "host_link_gb_per_s": _round(slowest["host"] / 1e9),
            "host_memory_gb": _round(host / 1e9),
            "disk_gb_per_s": _round(measure.disk_rate(Path.cwd()) / 1e9),
            **{field: _round(slowest[key] * 1e6) for key, field in WAITS.items() if key in slowest},
            "reserved_gb": 1.0 if cuda else 0.0,
        }
    }


def write_entry(entry: dict[str, Any], path: Path) -> None:
    """Write a catalogue file that holds `entry`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(OmegaConf.create(entry), path)
    except OSError as error:
        raise PlannerError(f"{path} cannot be written: {error.strerror}.") from error


def _measure(folder: str, *, world: int, cuda: bool) -> list[dict[str, float]]:
    """What each of `world` processes measured; all are stopped if one does not answer in time."""
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    arguments = [(rank, world, cuda, f"file://{folder}/rendezvous", answers) for rank in range(world)]
    processes = [context.Process(target=_rank, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(TIMEOUT)
        if any(process.exitcode != 0 for process in processes):
            raise PlannerError(
                f"the measurement failed or took over {TIMEOUT} s: see what its processes printed above."
            )
        return [answers.get() for _ in processes]
    finally:
        for process in processes:
            process.kill()


def _rank(rank: int, world: int, cuda: bool, rendezvous: str, answers: Any) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    wait = timedelta(seconds=TIMEOUT)
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=world, timeout=wait)
    measured = {name: measure.matrix_rate(device, dtype, 4096 if cuda else 768) for name, dtype in DTYPES.items()}
    measured["memory"] = measure.memory_rate(device)
    measured["update"] = measure.update_rate(device)
    measured["launch"] = measure.launch_seconds(device)
    measured["link"] = measure.link_rate(device) if world > 1 else measured["memory"]
    if not cuda:
        measured["product"], measured["weight"] = measure.product_rates(WIDTH)
        measured["added"] = measure.sum_rate(device) if world > 1 else measured["memory"]
        measured["alone"] = measure.gain_alone(rank, world, WIDTH)
        measured["fused"] = measure.update_rate(device, fused=True)
    measured["host"] = _host_rate(device) if cuda else measured["memory"]
    answers.put({**measured, **engine_seconds(rank, world)})
    dist.destroy_process_group()


def _host_rate(device: torch.device) -> float:
    host = torch.empty(measure.LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    return measure.LINK_BYTES / measure.best_seconds(lambda: host.to(device), device)


def _memory(cuda: bool, devices: int) -> tuple[float, float]:
    """Bytes per device, and of host memory per device."""
    host = machine_memory() / devices
    return (torch.cuda.get_device_properties(0).total_memory if cuda else host), host


def _round(number: float) -> float:
    return float(f"{number:.4g}")
