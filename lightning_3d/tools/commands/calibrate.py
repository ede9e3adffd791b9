"""Measure this machine in about a minute, and write its catalogue entry for plans.

Matrix products, memory, kernels, links and the disk are measured, by one process per device at once, as a training
would use them: two processes at most.
"""

import os
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from omegaconf import OmegaConf

from lightning_3d.axes.group import Group
from lightning_3d.axes.ring_wire import RingWire
from lightning_3d.errors import PlannerError
from lightning_3d.module.host_memory import machine_memory
from lightning_3d.tools.planner.catalogue import user_folder
from lightning_3d.tools.planner.step_time import USUAL_KERNELS

EXAMPLE = """\
examples:
  lightning-3d calibrate
  lightning-3d plan gpt2 --tokens 10M --precision 32 --cluster 2xthis-machine
  lightning-3d calibrate --name lab-box --output conf/lab.yaml
  lightning-3d plan gpt2 --tokens 10M --hardware conf/lab.yaml --cluster 4x2xlab-box
"""
TIMEOUT = 120
"""Seconds after which a measurement is given up."""
REPEATS = 10
LINK_BYTES, DISK_BYTES, COPY_BYTES = 16 << 20, 128 << 20, 256 << 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PASSES = 3
"""Kernels of forward and backward, over those of the forward."""
DISTURBED = 1.25
"""Ratio of two measurements of one rate above which other work ran beside them."""


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("--name", default="this-machine", help="name of the entry (default this-machine)")
    parser.add_argument("--output", metavar="FILE", help="YAML file to write (default: in your catalogue folder)")


def run(args: Namespace) -> int:
    name = args.name.lower()
    if not name.replace("-", "").replace("_", "").isalnum() or name[0].isdigit():
        raise PlannerError(f"--name {args.name!r} must be letters, digits and dashes, and start with a letter.")
    path = Path(args.output) if args.output else user_folder() / f"{name}.yaml"
    if path.is_dir():
        raise PlannerError(f"--output {path} is a folder: name a YAML file in it.")
    entry, doubt = calibrate(name)
    write_entry(entry, path)
    for field, value in entry[name].items():
        print(f"{field:<22} {value}")
    if doubt is not None:
        print(doubt, file=sys.stderr)
    print(f"wrote {path}: plan for this machine with --cluster {entry[name]['devices_per_node']}x{name}")
    return 0


def calibrate(name: str) -> tuple[dict[str, Any], str | None]:
    """A catalogue entry called `name` for this machine, and a line if other work disturbed it.

    A device is a GPU, or one CPU core where there is none.
    """
    cuda = torch.cuda.is_available()
    devices = torch.cuda.device_count() if cuda else os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        ranks = _measure(folder, world=min(2, devices), cuda=cuda)
    slowest = {key: min(rank[key] for rank in ranks) for key in ranks[0]}
    host = machine_memory() / devices
    memory = torch.cuda.get_device_properties(0).total_memory if cuda else host
    return {
        name: {
            "title": f"this machine, measured {date.today()} ({'GPU' if cuda else 'one process per CPU core'})",
            "memory_gb": _round(memory / 1e9),
            "peak_tflops": {dtype: _round(slowest[dtype] / 1e12) for dtype in DTYPES},
            "matrix_share": 1.0,
            "memory_gb_per_s": _round(slowest["memory"] / 1e9),
            "devices_per_node": devices,
            "node_link_gb_per_s": _round(slowest["link"] / 1e9),
            "cluster_link_gb_per_s": _round(slowest["link"] / 1e9),
            "link_share": 1.0,
            "host_link_gb_per_s": _round(slowest["host"] / 1e9),
            "host_memory_gb": _round(host / 1e9),
            "disk_gb_per_s": _round(disk_rate(Path.cwd()) / 1e9),
            "block_launch_us": _round(1e6 * PASSES * USUAL_KERNELS / slowest["kernels"]),
            "reserved_gb": 1.0 if cuda else 0.0,
        }
    }, _doubt(ranks)


def _doubt(ranks: list[dict[str, float]]) -> str | None:
    """A line for a machine that was busy: a rate that was measured twice and differs."""
    worst = max(ranks, key=lambda rank: rank["ratio"])["ratio"]
    if worst <= DISTURBED:
        return None
    return (
        f"the same matrix product took {worst:.1f} times as long in one of two measurements: other work ran beside"
        " them, and these figures contradict each other. Calibrate again while the machine is idle."
    )


def write_entry(entry: dict[str, Any], path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(OmegaConf.create(entry), path)
    except OSError as error:
        raise PlannerError(f"{path} cannot be written: {error.strerror}.") from error


def _measure(folder: str, *, world: int, cuda: bool) -> list[dict[str, float]]:
    """The measurements of each of `world` processes. All are stopped if one does not answer in time."""
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
    size = 4096 if cuda else 768
    measured = {name: matrix_rate(device, dtype, size) for name, dtype in DTYPES.items()}
    measured["memory"] = memory_rate(device)
    measured["kernels"] = kernel_rate(device)
    measured["link"] = link_rate(device) if world > 1 else measured["memory"]
    measured["host"] = measured["memory"]
    if cuda:
        host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
        measured["host"] = LINK_BYTES / best_seconds(lambda: host.to(device), device)
    pair = sorted((measured["fp32"], matrix_rate(device, torch.float32, size)))
    answers.put({**measured, "ratio": pair[1] / pair[0]})
    dist.destroy_process_group()


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / best_seconds(lambda: left @ right, device)


def memory_rate(device: torch.device) -> float:
    """Bytes per second of a copy, read and written bytes both counted."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / best_seconds(lambda: target.copy_(source), device)


def kernel_rate(device: torch.device) -> float:
    """Kernels that the host starts in a second, each with nearly nothing to compute."""
    few = torch.ones(8, device=device)
    return 1 / best_seconds(lambda: few.add_(1), device, inner=200)


def link_rate(device: torch.device) -> float:
    """Bytes per second that each of two ranks sends in a ring that sums a buffer over them."""
    ranks, buffer = dist.new_group(), torch.ones(LINK_BYTES // 4, device=device)
    group = Group(ranks, wire=RingWire(ranks))
    return LINK_BYTES / best_seconds(lambda: group.all_reduce(buffer, average=True), device)


def disk_rate(folder: Path) -> float:
    """Bytes per second written and synced to the disk that `folder` is on."""
    data = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        start = time.perf_counter()
        for _ in range(DISK_BYTES >> 20):
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return DISK_BYTES / (time.perf_counter() - start)


def best_seconds(work: Callable[[], object], device: torch.device, *, inner: int = 1) -> float:
    """The shortest of `REPEATS` timings of `work`, after one that warms up."""
    work()
    times = []
    for _ in range(REPEATS):
        _wait(device)
        start = time.perf_counter()
        for _ in range(inner):
            work()
        _wait(device)
        times.append((time.perf_counter() - start) / inner)
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _round(number: float) -> float:
    return float(f"{number:.4g}")
