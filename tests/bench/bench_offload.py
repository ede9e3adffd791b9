"""Memory and speed of a GPT with weights and states on a disk.

`python -m tests.bench.bench_offload [--case states|all|large|memory] [--folder DIR] [--steps 3]`. "states" and "all"
train 400M parameters on one process, "large" 1.5B on two, all with AdamW in fp32. Printed are the peak of resident
memory (VmHWM) over that before the module exists, seconds of a step, and the bandwidth of the disk that a step uses,
next to what the disk does by itself through the same file.
"""

import argparse
import time
import warnings
from pathlib import Path

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn

from lightning_3d import Strategy3D
from lightning_3d.module.host_memory import return_freed_memory
from lightning_3d.offload.disk_file import DiskFile
from lightning_3d.offload.disk_tensors import DiskTransfers
from tests.parity import QUIET
from tests.workers import run
from tests.zoo.sized import Block

VOCABULARY, TOKENS = 32000, 64
SIZES = {"tiny": (64, 4), "small": (1024, 29), "billion": (2048, 20), "large": (2048, 28)}
"""Width and number of blocks: 2M, 398M, 1.07B and 1.48B parameters."""
CASES = {
    "memory": (1, "small", {"zero_stage": 3}, {}),
    "states": (1, "small", {}, {"optimizer": "disk"}),
    "all": (1, "small", {"zero_stage": 3}, {"optimizer": "disk", "parameters": "disk"}),
    "large": (2, "large", {"zero_stage": 3}, {"optimizer": "disk", "parameters": "disk"}),
}


class GPT(LightningModule):
    def __init__(self, size, steps):
        super().__init__()
        self.size, self.steps, self.blocks = size, steps, None

    def configure_model(self):
        if self.blocks is None:
            width, blocks = SIZES[self.size]
            self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(TOKENS, width)
            self.blocks = nn.ModuleList(Block(width, width // 64) for _ in range(blocks))
            self.head = nn.Linear(width, VOCABULARY, bias=False)
            self.head.weight = self.tokens.weight
            nn.init.normal_(self.head.weight, std=0.02)

    def training_step(self, batch, batch_idx):
        x = self.tokens(batch) + self.places.weight[: batch.shape[1]]
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())

    def train_dataloader(self):
        batches = torch.randint(0, VOCABULARY, (16, TOKENS), generator=torch.Generator().manual_seed(3))
        return torch.utils.data.DataLoader(batches[: self.steps], batch_size=1)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-4)


class Clock(Callback):
    """Seconds of each whole step and of each optimizer step, and the bytes of the disk in them.

    After each step it measures the disk by itself: other work on the machine slows both.
    """

    def __init__(self, folder):
        self.folder, self.disk, self.peak = folder, [bandwidth(folder)], 0
        self.steps, self.losses = [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.begin = time.perf_counter(), self._moved(trainer)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.middle = time.perf_counter(), self._moved(trainer)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        end = time.perf_counter(), self._moved(trainer)
        self.losses.append(float(outputs["loss"]))
        self.steps.append(
            [b - a for one, two in ((self.begin, end), (self.middle, end)) for a, b in zip(one, two, strict=True)]
        )
        self.peak = max(self.peak, resident("VmHWM"))
        self.disk.append(bandwidth(self.folder))
        begin_peak()  # without the memory of that

    def shares(self):
        """Of each optimizer step, the share of the disk's bandwidth before and after it that it has used."""
        own = zip(self.steps, self.disk, self.disk[1:], strict=False)
        return [step[3] / step[2] / ((before + after) / 2) for step, before, after in own]

    def _moved(self, trainer):
        disk = trainer.strategy._parallel.disk
        return disk.moved if disk else 0


def resident(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(what)).split()[1])


def begin_peak():
    """Have VmHWM begin with what is resident now, and return that."""
    return_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def bandwidth(folder, megabytes=256):
    """Bytes a second of reads and writes of the disk, half of each, in the way that a step uses it."""
    file, transfers = DiskFile(Path(folder)), DiskTransfers(3 * 70 * 2**20)
    tensors = [torch.zeros(2**24) for _ in range(megabytes // 64)]
    items = [transfers.store(file, [[tensor]]) for tensor in tensors]
    transfers.finish()
    began, before = time.perf_counter(), transfers.moved
    for item, following in zip(items, [*items[1:], []], strict=True):
        batch = transfers.fetch(item)
        transfers.prefetch(following)
        transfers.put_back(batch, changed=True)
    transfers.finish()
    return (transfers.moved - before) / (time.perf_counter() - began)


def measure(world, size, strategy, offload, folder, budget, steps):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seed_everything(1, verbose=False)
    chosen = dict.fromkeys(offload, f"nvme:{folder}")
    chosen = {"offload": chosen, "offload_budget": budget} if chosen else {}
    clock = Clock(folder)
    placed = Strategy3D(quiet=True, teardown="sharded" if strategy else "whole", **strategy, **chosen)
    trainer = Trainer(**{**QUIET, "callbacks": [clock]}, devices=world, strategy=placed, max_epochs=1)
    begin_peak()
    base = resident("VmRSS")
    trainer.fit(GPT(size, steps))
    return {
        "peak": max(clock.peak, resident("VmHWM")) - base,
        "disk": clock.disk,
        "steps": clock.steps,
        "losses": clock.losses,
        "shares": clock.shares(),
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, default="states")
    parser.add_argument("--folder", default="/tmp")
    parser.add_argument("--budget", default="0.5GB")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    world, size, strategy, offload = CASES[args.case]
    results = run(
        measure, world, size, strategy, offload, args.folder, args.budget, args.steps, world=world, timeout=3000
    )
    for rank, got in enumerate(results):
        print(f"rank {rank}: peak {got['peak'] / 1e9:.2f} GB, losses {got['losses']}")
        for (seconds, moved, step, stepped), disk in zip(got["steps"], got["disk"], strict=False):
            print(
                f"  step {seconds:.1f} s, {moved / 1e9:.2f} GB; optimizer {step:.1f} s, {stepped / 1e9:.2f} GB:",
                end=" ",
            )
            print(f"{stepped / step / 1e9:.2f} GB/s of the disk's {disk / 1e9:.2f}")
        print(f"  shares of the disk's bandwidth: {got['shares']}")


if __name__ == "__main__":
    main()
