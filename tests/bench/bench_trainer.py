"""Steps of whole Trainer runs against Lightning's own strategies: `python -m tests.bench.bench_trainer [--alone]`.

The same GPT of some 20M parameters, unchanged, under each strategy in turn, several rounds in the same processes; the
table shows the median step over all rounds and the median over rounds of the ratio to the strategy it is judged by.
"""

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from itertools import chain, pairwise
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_3d import Strategy3D
from tests.bench.bench_step import Gpt
from tests.parity import QUIET
from tests.workers import run

SKIP = 3
"""First steps of a fit that are not counted."""


class Training(LightningModule):
    def __init__(self, layers: int, width: int, batch: int, length: int) -> None:
        super().__init__()
        self.model = Gpt(layers, width)
        self.shape = (batch, length)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = self.model(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader:
        batch, length = self.shape
        return DataLoader(torch.randint(256, (batch * 200, length)), batch_size=batch)


class HandSharded(Training):
    """What Lightning asks the author to write for ZeRO 3."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


class Stopwatch(Callback):
    def __init__(self) -> None:
        self.marks: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.marks.append(time.perf_counter())

    def on_train_end(self, *_: Any) -> None:
        self.marks.append(time.perf_counter())


CASES: dict[str, tuple[Callable[[], Any], type[Training]]] = {
    "ddp": (DDPStrategy, Training),
    "3d_zero0": (lambda: Strategy3D(zero_stage=0, quiet=True), Training),
    "3d_zero1": (lambda: Strategy3D(zero_stage=1, quiet=True), Training),
    "3d_zero2": (lambda: Strategy3D(zero_stage=2, quiet=True), Training),
    # its default on one node is all tensor and no data parallelism, which would send nothing here
    "model parallel": (lambda: ModelParallelStrategy(2, 1), HandSharded),
    "3d_zero3": (lambda: Strategy3D(zero_stage=3, quiet=True), Training),
}
ALONE: dict[str, tuple[Callable[[], Any], type[Training]]] = {
    "no strategy": (lambda: "auto", Training),
    "3d": (lambda: Strategy3D(quiet=True), Training),
}
AGAINST = {"3d_zero0": "ddp", "3d_zero1": "ddp", "3d_zero2": "ddp", "3d_zero3": "model parallel", "3d": "no strategy"}


def _rounds(names: list[str], world: int, shape: tuple[int, int, int, int], rounds: int, steps: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    times: dict[str, list[list[float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            strategy, module = {**CASES, **ALONE}[name]
            torch.manual_seed(0)
            watch = Stopwatch()
            flags = {**QUIET, "max_steps": SKIP + steps, "callbacks": [watch]}
            Trainer(**flags, devices=world, strategy=strategy()).fit(module(*shape))
            ends = watch.marks[SKIP:]
            times[name].append([after - before for before, after in pairwise(ends)][:-1])
    return times


def _show(times: dict[str, list[list[float]]]) -> None:
    for name, rounds in times.items():
        line = f"{name:16}{1e3 * statistics.median(chain.from_iterable(rounds)):10.1f} ms"
        if name in AGAINST and AGAINST[name] in times:
            pairs = zip(rounds, times[AGAINST[name]], strict=True)
            ratio = statistics.median(statistics.median(mine) / statistics.median(theirs) for mine, theirs in pairs)
            line += f"   {ratio:.3f} of {AGAINST[name]}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--shape", type=int, nargs=4, default=[6, 512, 2, 64], help="layers width batch length")
    parser.add_argument("--only", nargs="*", default=list(CASES))
    parser.add_argument("--alone", action="store_true", help="also the cost of the strategy on one device")
    a = parser.parse_args()
    shape = tuple(a.shape)
    _show(run(_rounds, a.only, 2, shape, a.rounds, a.steps, world=2, timeout=600)[0])
    if a.alone:
        _show(run(_rounds, list(ALONE), 1, shape, a.rounds, a.steps, world=1, timeout=600)[0])


if __name__ == "__main__":
    main()
