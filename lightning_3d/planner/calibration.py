"""Measuring this machine with one process per device at once, as a training would use it, into a catalogue entry.

What the strategy itself costs, measured by training modules that have next to nothing to compute.

Runs inside a process group of two. The strategy is found by its registered name, since it is built on the planner and
not the other way round.
"""

import logging
import os
import tempfile
import time
import warnings
from datetime import date, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import StrategyRegistry
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d.errors import PlannerError
from lightning_3d.planner import machine_speed
from lightning_3d.planner.local_cluster import machine_memory
from lightning_3d.planner.machine_speed import best_seconds

TIMEOUT = 120
"""Seconds after which a measurement is given up."""
WAITS = {
    "launch": "block_launch_us", "sum": "collective_us", "loop": "step_us", "shard": "shard_us", "stage": "stage_us"
}  # fmt: skip
"""Measurements in seconds; the rest are rates."""
CORES = {"weight": "weight_gb_per_s", "added": "sum_gb_per_s", "fused": "shard_update_gb_per_s"}
"""Measurements made only where devices are cores."""
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
            "disk_gb_per_s": _round(machine_speed.disk_rate(Path.cwd()) / 1e9),
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
    measured = {name: machine_speed.matrix_rate(device, dtype, 4096 if cuda else 768) for name, dtype in DTYPES.items()}
    measured["memory"] = machine_speed.memory_rate(device)
    measured["update"] = machine_speed.update_rate(device)
    measured["launch"] = machine_speed.launch_seconds(device)
    measured["link"] = machine_speed.link_rate(device) if world > 1 else measured["memory"]
    if not cuda:
        measured["product"], measured["weight"] = machine_speed.product_rates(WIDTH)
        measured["added"] = machine_speed.sum_rate(device) if world > 1 else measured["memory"]
        measured["alone"] = machine_speed.gain_alone(rank, world, WIDTH)
        measured["fused"] = machine_speed.update_rate(device, fused=True)
    measured["host"] = _host_rate(device) if cuda else measured["memory"]
    answers.put({**measured, **engine_seconds(rank, world)})
    dist.destroy_process_group()


def _host_rate(device: torch.device) -> float:
    host = torch.empty(machine_speed.LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    return machine_speed.LINK_BYTES / machine_speed.best_seconds(lambda: host.to(device), device)


def _memory(cuda: bool, devices: int) -> tuple[float, float]:
    """Bytes per device, and of host memory per device."""
    host = machine_memory() / devices
    return (torch.cuda.get_device_properties(0).total_memory if cuda else host), host


def _round(number: float) -> float:
    return float(f"{number:.4g}")


STEPS, FEW, MANY = 24, 2, 10
ROWS, RESIDUAL_WIDTH = 8, 16


def engine_seconds(rank: int, world: int) -> dict[str, float]:
    """Seconds of a step's loop, of sharding one block, of one sum over tensor ranks, of one microbatch on a stage; of
    one device only the first."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="calibrate",
    )  # fmt: skip
    few, many = step_seconds(world, FEW, zero_stage=0), step_seconds(world, MANY, zero_stage=0)
    block = max(0.0, (many - few) / (MANY - FEW))

    def each(**layout: Any) -> float:
        """The additional seconds of a block in this layout."""
        more = step_seconds(world, MANY, **layout) - step_seconds(world, FEW, **layout)
        return max(0.0, more / (MANY - FEW) - block)

    loop = {"loop": max(0.0, few - FEW * block)}
    if world == 1:
        return loop
    short = step_seconds(world, world, pipeline_parallel_size=world, num_microbatches=2)
    long = step_seconds(world, world, pipeline_parallel_size=world, num_microbatches=ROWS)
    return {
        **loop,
        "shard": each(zero_stage=1),
        "sum": each(tensor_parallel_size=world) / 2,
        "stage": max(0.0, (long - short) / (ROWS - 2) - block_seconds()),
    }


def step_seconds(world: int, blocks: int, **layout: Any) -> float:
    """The quickest step of a chain of `blocks` tiny blocks: what else the machine does only ever adds."""
    watch = StepTimes()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    strategy = StrategyRegistry["3d"]["strategy"](quiet=True, **layout)
    trainer = Trainer(
        accelerator="cpu" if not torch.cuda.is_available() else "gpu",
        devices=world,
        strategy=strategy,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        max_steps=STEPS,
        callbacks=[watch],
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(_Chain(blocks), DataLoader([some_rows()] * STEPS, batch_size=None))  # type: ignore[arg-type]
    return min(after - before for before, after in pairwise(watch.ends[2:]))


def some_rows() -> Tensor:
    """A batch. No two numbers are the same: of equal ones a block cannot be proven to split, and would send nothing."""
    return torch.linspace(-1, 1, ROWS * RESIDUAL_WIDTH).view(ROWS, RESIDUAL_WIDTH)


def block_seconds() -> float:
    """Forward and backward of one tiny block on a microbatch of one row."""
    block, row = _Residual(), torch.ones(1, RESIDUAL_WIDTH, requires_grad=True)
    return best_seconds(lambda: block(row).sum().backward(), row.device, inner=20)


class StepTimes(Callback):
    """When steps ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.ends.append(time.perf_counter())


class _Chain(LightningModule):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Residual() for _ in range(blocks)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        loss = batch.square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(RESIDUAL_WIDTH, 2 * RESIDUAL_WIDTH),
            nn.Linear(2 * RESIDUAL_WIDTH, RESIDUAL_WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))
