"""The seconds of steps of real training, beside those that the planner expects."""

import time
import warnings
from functools import cache
from itertools import combinations
from typing import Any

from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_3d import Strategy3D
from lightning_3d.auto_layout import run_ahead
from lightning_3d.pipeline.microbatch import auto_microbatches, batch_size
from lightning_3d.planner.job import Job
from lightning_3d.planner.local_cluster import cluster_here
from lightning_3d.planner.priced_layout import price_layout
from lightning_3d.planner.profile_module import CostTrace, count_module, measured_profile
from tests.parity import QUIET
from tests.zoo.registry import members
from tests.zoo.sized import LAYOUTS


class StepTimer(Callback):
    """Times every step, from the moment when all ranks have their batch."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        trainer.strategy.barrier()
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.times.append(time.perf_counter() - self.began)


def step_times(name: str, layout: str) -> list[float]:
    """Train the module of the zoo under the layout of `LAYOUTS` on this rank."""
    warnings.simplefilter("ignore")
    seed_everything(7, verbose=False)
    timer = StepTimer()
    strategy = Strategy3D(quiet=True, **LAYOUTS[layout])
    flags = {**QUIET, "devices": int(layout.split()[0]), "strategy": strategy, "max_epochs": 1}
    Trainer(**flags, limit_val_batches=0, callbacks=[timer]).fit(members("sized")[name].build())
    return timer.times


@cache
def predicted_seconds(name: str, layout: str) -> float:
    """The planner's time of a step of the module of the zoo under the layout of `LAYOUTS` on this machine."""
    world, module = int(layout.split()[0]), members("sized")[name].build()
    chosen, batch = Strategy3D(**LAYOUTS[layout])._wanted.fit(world), module.batch()
    rows = batch_size(batch)
    trace = CostTrace(samples=rows)
    run_ahead(module, batch, trace)
    profile = measured_profile(count_module(module, name=name), trace)
    pieces = chosen.num_microbatches
    if chosen.pipeline_parallel_size == 1:
        pieces = 1
    elif pieces == "auto":
        pieces = auto_microbatches(rows, chosen.pipeline_parallel_size)
    samples = rows * chosen.data_parallel_size
    job = Job(profile=profile, samples=samples, batch=samples, precision="32")
    plan = price_layout(job, cluster_here("cpu", devices_per_node=world), chosen, micro=rows // pieces)
    return plan.time.total


def quickest(ranks: list[list[float]]) -> float:
    """The quickest step: a step ends when the last rank ends it."""
    return min(map(max, zip(*(times[2:-1] for times in ranks), strict=True)))


def in_order(pairs: list[tuple[float, float]]) -> float:
    """The share of pairs of layouts whose quicker one is the one that was predicted to be."""
    compared = [(a[0] < b[0]) == (a[1] < b[1]) for a, b in combinations(pairs, 2)]
    return sum(compared) / len(compared)
