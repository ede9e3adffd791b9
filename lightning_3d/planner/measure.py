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

REPEATS = 5
LINK_BYTES, DISK_BYTES, COPY_BYTES = 16 << 20, 128 << 20, 256 << 20


def matrix_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of a `size` x `size` product."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / best_seconds(lambda: left @ right, device)


def memory_rate(device: torch.device) -> float:
    """Bytes per second of a copy, read and written bytes both counted."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / best_seconds(lambda: target.copy_(source), device)


def update_rate(device: torch.device) -> float:
    """Bytes per second of AdamW on 2M parameters in matrices: weights and gradients once, states read and written."""
    parameters = [nn.Parameter(torch.zeros(1024, 512, device=device)) for _ in range(4)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW(parameters)
    elements = sum(parameter.numel() for parameter in parameters)
    return 24 * elements / best_seconds(optimizer.step, device)


def launch_seconds(device: torch.device) -> float:
    """Forward and backward of a block so small that only starting its kernels takes time."""
    block = _TinyBlock().to(device)
    x = torch.randn(1, 4, 8, device=device, requires_grad=True)
    return best_seconds(lambda: block(x).sum().backward(), device, inner=20)


def link_rate(device: torch.device) -> float:
    """Bytes per second that two ranks exchange while adding what arrives, as one hop of a ring does."""
    peer = 1 - dist.get_rank()
    send = torch.ones(LINK_BYTES // 4, device=device)
    receive = torch.empty_like(send)

    def hop() -> None:
        works = [dist.irecv(receive, peer), dist.isend(send, peer)]
        for work in works:
            assert work is not None, "both ranks are in the group"
            work.wait()
        send.mul_(0.5).add_(receive, alpha=0.5)

    return LINK_BYTES / best_seconds(hop, device)


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
