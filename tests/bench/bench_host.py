"""CPU time of the main thread in one step, which bounds small modules on GPUs: `python -m tests.bench.bench_host`.

Eight blocks of width 64 on two ranks, where nearly everything is launches. Contestants take turns, and only ratios
within a round count. Each row has the contestant that it is compared with and the ratio that it must not exceed.
"""

import argparse
import statistics
import warnings
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from tests.bench.contestants import QUIET, Turns
from tests.bench.meter import Meter
from tests.bench.turns import Job, race


class Net(LightningModule):
    """Eight blocks between an embedding and a head."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        layer: dict[str, Any] = {"d_model": 64, "nhead": 4, "dim_feedforward": 256, "dropout": 0.0}
        self.steps = steps
        self.embed = nn.Embedding(64, 64)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(**layer, batch_first=True) for _ in range(8))
        self.head = nn.Linear(64, 64)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        x = self.embed(batch)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.randint(0, 64, (4 * 2 * self.steps, 8)), batch_size=4)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class ShardedBlocks(Net):
    """As Lightning's ModelParallelStrategy asks the author of the module to write it."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        assert self.device_mesh is not None
        for block in self.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])


def train(meter: Meter, sizes: Any) -> None:
    """Train in one layout: the arguments of Strategy3D, or the name of a strategy of Lightning."""
    warnings.simplefilter("ignore")
    from lightning.pytorch.strategies import ModelParallelStrategy

    from lightning_3d import Strategy3D

    strategy = Strategy3D(**sizes, quiet=True) if isinstance(sizes, dict) else sizes
    kind = Net
    if sizes == "fully_shard":
        strategy, kind = ModelParallelStrategy(meter.world, 1), ShardedBlocks
    meter.begin()
    flags = {**QUIET, "devices": meter.world, "strategy": strategy, "max_steps": meter.total}
    Trainer(**flags, callbacks=[Turns(meter)]).fit(kind(meter.total))


ROWS: dict[str, tuple[Any, str, float]] = {
    "one device": ("auto", "", 0.0),
    "ddp": ("ddp", "", 0.0),
    "fully_shard": ("fully_shard", "", 0.0),
    "zero0": ({"zero_stage": 0}, "ddp", 1.1),
    "zero1": ({"zero_stage": 1}, "ddp", 1.5),
    "zero2": ({"zero_stage": 2}, "ddp", 1.5),
    "zero3": ({"zero_stage": 3}, "fully_shard", 0.75),
    "tensor": ({"tensor_parallel_size": 2}, "one device", 2.0),
    "context": ({"context_parallel_size": 2, "zero_stage": 0}, "one device", 2.0),
    "pipeline": ({"pipeline_parallel_size": 2, "num_microbatches": 2}, "one device", 1.5),
}
"""The layout, the row that it is compared with, and the bar."""


def measure(names: list[str], steps: int, rounds: int, say: Any = print) -> dict[str, list[float]]:
    """Return the CPU milliseconds of a step in the main thread of the slower rank, for each turn."""
    jobs = {name: Job(name, partial(train, sizes=ROWS[name][0]), 1 if name == "one device" else 2) for name in names}
    race(list(jobs.values()), steps, rounds, 180.0, say)
    failed = {job.name: job.error for job in jobs.values() if job.error}
    assert not failed, failed
    return {name: [1e3 * host for host in job.hosts] for name, job in jobs.items()}


def ratio(found: dict[str, list[float]], name: str) -> float:
    """Return the median of the ratios of each round to the row that `name` is compared with."""
    return statistics.median(mine / theirs for mine, theirs in zip(found[name], found[ROWS[name][1]], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn")
    parser.add_argument("--only", nargs="*", default=list(ROWS), choices=ROWS, metavar="NAME")
    asked = parser.parse_args()
    found = measure(asked.only, asked.steps, asked.rounds)
    print(f"| | ms | ratio | bar | to |\n|---|{'---:|' * 3}---|")
    for name, times in found.items():
        _, base, bar = ROWS[name]
        compared = f"{ratio(found, name):.2f} | {bar} | {base}" if base in found else "| |"
        print(f"| {name} | {statistics.median(times):.1f} | {compared} |")


if __name__ == "__main__":
    main()
