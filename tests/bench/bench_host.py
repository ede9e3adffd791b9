"""CPU time of the main thread in one step, which bounds small models on GPUs: `python -m tests.bench.bench_host`.

Eight blocks of width 64 on two ranks, where nearly everything is launches. Each row names the row that it is compared
with and the ratio that it must not exceed. Layouts take turns, and the least of all rounds counts: other work on the
machine adds to CPU time through caches.
"""

import argparse
import statistics
import time
import warnings

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_3d import Strategy3D
from tests.parity import QUIET
from tests.workers import run

WARM, STEPS = 10, 40


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        layer = {"d_model": 64, "nhead": 4, "dim_feedforward": 256, "dropout": 0.0, "batch_first": True}
        self.embed = nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(**layer) for _ in range(8))
        self.head = nn.Linear(64, 64)

    def training_step(self, batch, batch_idx):
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())

    def train_dataloader(self):
        return DataLoader(torch.randint(0, 64, (4 * (WARM + STEPS + 2) * 2, 8)), batch_size=4)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Sharded(Net):
    def configure_model(self):
        for block in self.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])


class Clock(Callback):
    def __init__(self):
        self.marks = []

    def on_train_batch_start(self, *_):
        self.marks.append(time.thread_time())


ROWS = {
    "one device": (None, "", 0.0),
    "ddp": ("ddp", "", 0.0),
    "fully_shard": ("fully_shard", "", 0.0),
    "zero0": ({"zero_stage": 0}, "ddp", 1.1),
    "zero1": ({"zero_stage": 1}, "ddp", 1.5),
    "zero2": ({"zero_stage": 2}, "ddp", 1.5),
    "zero3": ({"zero_stage": 3}, "fully_shard", 0.75),
    "tensor": ({"tensor_parallel_size": 2}, "one device", 2.0),
    "pipeline": ({"pipeline_parallel_size": 2, "num_microbatches": 2}, "one device", 1.5),
}


def measure(name: str) -> float:
    """Milliseconds of the median step."""
    warnings.simplefilter("ignore")
    chosen, clock = ROWS[name][0], Clock()
    if chosen is None:
        strategy = "auto"
    elif chosen == "fully_shard":
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    else:
        strategy = "ddp" if chosen == "ddp" else Strategy3D(**chosen, quiet=True)
    flags = {"devices": 1 if chosen is None else 2, "strategy": strategy, "max_steps": WARM + STEPS}
    trainer = Trainer(**{**QUIET, **flags, "limit_val_batches": 0, "callbacks": [clock]})
    trainer.fit(Sharded() if chosen == "fully_shard" else Net())
    steps = [after - before for before, after in zip(clock.marks, clock.marks[1:], strict=False)]
    return 1e3 * statistics.median(steps[WARM:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(ROWS))
    asked = parser.parse_args()
    found: dict[str, list[float]] = {name: [] for name in asked.only}
    for _ in range(asked.rounds):
        for name, times in found.items():
            times.append(max(run(measure, name, world=1 if ROWS[name][0] is None else 2, timeout=200)))
    print(f"{'':14}{'ms':>8}{'ratio':>8}{'limit':>8}  to")
    for name, times in found.items():
        _, base, limit = ROWS[name]
        ratio = f"{min(times) / min(found[base]):8.2f}{limit:8.2f}  {base}" if base in found else ""
        print(f"{name:14}{min(times):8.1f}{ratio}")


if __name__ == "__main__":
    main()
