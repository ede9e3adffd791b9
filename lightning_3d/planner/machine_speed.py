"""Measurements of one process of this machine: matrix products, memory, launching, links, disk."""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_3d.comm.ring import ring_all_reduce
from lightning_3d.comm.ring_wire import Wire
from lightning_3d.planner.step_time import WEIGHT_PASSES

REPEATS = 10
LINK_BYTES, DISK_BYTES, COPY_BYTES = 16 << 20, 128 << 20, 256 << 20
SUM_BYTES = 1 << 20
FEW_ROWS, MANY_ROWS, PAIRS = 16, 512, 4


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of a `size` x `size` product."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / best_seconds(lambda: left @ right, device)


def product_rates(width: int) -> tuple[float, float]:
    """FLOP/s of a core's products with weights, forward and backward, and bytes per second at which it passes over the
    weights.

    The time of a product grows with its rows from what its weights take alone: it is measured for few and for many.
    """
    layers = [nn.Linear(a, b) for _ in range(PAIRS) for a, b in ((width, 4 * width), (4 * width, width))]
    chain, cpu = nn.Sequential(*layers), torch.device("cpu")
    elements = sum(parameter.numel() for parameter in chain.parameters())

    def seconds(rows: int) -> float:
        x = torch.ones(rows, width, requires_grad=True)
        return best_seconds(lambda: chain(x).sum().backward(), cpu)

    few, many = seconds(FEW_ROWS), seconds(MANY_ROWS)
    per_row = max(many - few, many / 2) / (MANY_ROWS - FEW_ROWS)
    alone = max(few - FEW_ROWS * per_row, few / 10)
    return 6 * elements / per_row, WEIGHT_PASSES * elements * 4 / alone


def gain_alone(rank: int, world: int, width: int) -> float:
    """Gain of this core while the others rest, over its rate while all train."""
    chain = nn.Sequential(nn.Linear(width, 4 * width), nn.Linear(4 * width, width))
    optimizer, x, cpu = torch.optim.AdamW(chain.parameters()), torch.ones(MANY_ROWS, width), torch.device("cpu")

    def step() -> None:
        chain(x).sum().backward()
        optimizer.step()

    dist.barrier()
    together = best_seconds(step, cpu)
    mine = 0.0
    for turn in range(world):
        dist.barrier()
        if turn == rank:
            mine = best_seconds(step, cpu)
    dist.barrier()
    return max(1.0, together / mine)


def memory_rate(device: torch.device) -> float:
    """Bytes per second of a copy, read and written bytes both counted."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / best_seconds(lambda: target.copy_(source), device)


def update_rate(device: torch.device, fused: bool | None = None) -> float:
    """Bytes per second of AdamW on 2M parameters in matrices: weights and gradients once, states read and written."""
    parameters = [nn.Parameter(torch.zeros(1024, 512, device=device)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=fused)
    elements = sum(parameter.numel() for parameter in parameters)
    return 24 * elements / best_seconds(optimizer.step, device)


def launch_seconds(device: torch.device) -> float:
    """Forward and backward of a block so small that only starting its kernels takes time.

    A core does the starting itself, some of it after products that have emptied its caches, some in a row: here every
    other block comes after a product.
    """
    block = _TinyBlock().to(device)
    x = torch.randn(1, 4, 8, device=device, requires_grad=True)
    if device.type != "cpu":
        return best_seconds(lambda: block(x).sum().backward(), device, inner=20)
    matrix = torch.ones(512, 512)
    alone = best_seconds(lambda: matrix @ matrix, device, inner=20)
    both = best_seconds(lambda: (matrix @ matrix, block(block(x)).sum().backward()), device, inner=20)
    return max(both - alone, both / 100) / 2


def link_rate(device: torch.device) -> float:
    """Bytes per second that each of two ranks sends in a ring that sums a buffer over them."""
    wire, buffer = Wire(dist.new_group()), torch.ones(LINK_BYTES // 4, device=device)
    return LINK_BYTES / best_seconds(lambda: ring_all_reduce(buffer, wire, average=True), device)


def sum_rate(device: torch.device) -> float:
    """Bytes per second that each of two ranks sends while the library sums a buffer of activations over them."""
    buffer = torch.zeros(SUM_BYTES // 4, device=device)
    return SUM_BYTES / best_seconds(lambda: dist.all_reduce(buffer), device, inner=5)


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


class _TinyBlock(nn.Module):
    """A transformer block of width 8."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.view(1, 4, 2, 4).transpose(1, 2) for part in self.qkv(self.norms[0](x)).split(8, dim=2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(1, 4, 8))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))
