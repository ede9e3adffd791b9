"""What the strategy itself costs, measured by training modules that have next to nothing to compute.

Runs inside a process group of two. The strategy is found by its registered name, since it is built on the planner and
not the other way round.
"""

import logging
import os
import time
import warnings
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_3d.planner.measure import best_seconds

STEPS, FEW, MANY = 24, 2, 10
ROWS, WIDTH = 8, 16


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
        """What a block costs more in this layout."""
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
    return torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH)


def block_seconds() -> float:
    """Forward and backward of one tiny block on a microbatch of one row."""
    block, row = _Residual(), torch.ones(1, WIDTH, requires_grad=True)
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
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))
