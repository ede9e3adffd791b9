"""Losses, traffic and runs of `training_step` for each layout: `python -m tests.yardsticks.measure FILE` records them.

A change of structure must change none of these numbers, but for the runs ahead of training, which may only fall.
"""

import argparse
import json
import os
from pathlib import Path
from types import SimpleNamespace

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_3d import Strategy3D
from tests.parity import QUIET
from tests.workers import run
from tests.zoo import MODULES

LAYOUTS: dict[str, dict] = {
    "zero0": {"zero_stage": 0},
    "zero0_native": {"zero_stage": 0, "grad_sync": "native"},
    "zero0_int8": {"zero_stage": 0, "grad_compression": "int8"},
    "zero1": {"zero_stage": 1},
    "zero1_powersgd": {"zero_stage": 1, "grad_compression": "powersgd"},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "zero3_offload": {"zero_stage": 3, "offload": "all"},
    "hybrid": {"zero_stage": 3, "zero_shard_size": 2, "world": 4},
    "tensor": {"tensor_parallel_size": 2},
    "sequence": {"tensor_parallel_size": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_parallel_size": 2},
    "gpipe": {"pipeline_parallel_size": 2, "schedule": "gpipe", "num_microbatches": 3},
    "whole_loss": {"pipeline_parallel_size": 2, "loss_scope": "batch"},
    "interleaved": {"pipeline_parallel_size": 2, "schedule": "interleaved_1f1b", "stages_per_rank": 2},
    "tensor_pipeline": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "world": 4},
    "data_tensor": {"tensor_parallel_size": 2, "zero_stage": 2, "world": 4},
    "data_pipeline": {"pipeline_parallel_size": 2, "zero_stage": 1, "world": 4},
}
KINDS = ("GPT", "Encoder")
BATCHES = 6
RUNS = SimpleNamespace(count=0)
"""Runs of `training_step` in this process. A module or a file would lose such a count to a snapshot."""


class Count(Callback):
    """Runs of `training_step` before the first batch and in each batch; traffic of the whole fit."""

    def __init__(self) -> None:
        self.marks: list[int] = []
        self.runs: list[int] = []
        self.sent: list[list] = []

    def on_train_batch_start(self, *_: object) -> None:
        self.marks.append(RUNS.count)

    def on_train_batch_end(self, *_: object) -> None:
        self.runs.append(RUNS.count - self.marks[-1])

    def on_train_end(self, trainer: Trainer, *_: object) -> None:
        rows = trainer.strategy.data_axis.ledger.rows()
        self.sent = [[row.axis, row.collective, row.calls, row.bytes] for row in rows]


def counting(kind: type) -> type:
    """`kind` with a `training_step` that counts its runs."""

    def training_step(self, batch, batch_idx):
        RUNS.count += 1
        return kind.training_step(self, batch, batch_idx)

    return type(kind.__name__, (kind,), {"training_step": training_step})


def fit(kind: str, strategy: dict, precision: str) -> dict:
    """Train on this rank and return its row of the yardstick."""
    seed_everything(7, verbose=False)
    RUNS.count = 0
    module, count = counting(MODULES[kind])(), Count()
    plugin = Strategy3D(**strategy, quiet=True)
    trainer = Trainer(
        **{**QUIET, "devices": int(os.environ["WORLD_SIZE"]), "strategy": plugin, "limit_train_batches": BATCHES, "max_epochs": 1,
           "limit_val_batches": 2, "callbacks": [count], "precision": precision}
    )  # fmt: skip
    trainer.fit(module)
    return {
        "losses": [float(f"{loss:.6g}") for loss in module.seen],
        "weights": float(f"{sum(p.double().abs().sum() for p in module.parameters()):.6g}"),
        "sent": count.sent,
        "runs": [count.marks[0], count.runs[0], count.runs[-1]],
    }


def measure(kind: str, layout: str, precision: str = "32-true") -> list[dict]:
    strategy = dict(LAYOUTS[layout])
    world = strategy.pop("world", 2)
    return run(fit, kind, strategy, precision, world=world, timeout=120)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    table = {f"{kind}-{layout}": measure(kind, layout) for kind in KINDS for layout in LAYOUTS}
    table |= {f"GPT-{layout}-bf16": measure("GPT", layout, "bf16-mixed") for layout in ("zero1", "zero3", "tensor")}
    lines = [f"{json.dumps(name)}: {json.dumps(rows)}" for name, rows in table.items()]
    parser.parse_args().file.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
