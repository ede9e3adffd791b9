"""Modules that the planner refuses, and some that only look as if it should."""

import sys

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn


class Good(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids))

    def training_step(self, batch, batch_idx):
        return self(batch).mean()


class NoIndex(Good):
    def training_step(self, batch):
        return self(batch).mean()


class Tuple(Good):
    example_input_array = (torch.zeros(2, 16, dtype=torch.int64),)


class Dict(Good):
    example_input_array = {"ids": torch.zeros(2, 16, dtype=torch.int64)}  # noqa: RUF012


class Empty(Good):
    example_input_array = torch.zeros(0, 16, dtype=torch.int64)


class Prints(Good):
    def __init__(self) -> None:
        super().__init__()
        print("from the constructor")

    def training_step(self, batch, batch_idx):
        print("from the step")
        return self(batch).mean()


class NoLoss(Good):
    def training_step(self, batch, batch_idx):
        self(batch)


class ReadsValues(Good):
    def training_step(self, batch, batch_idx):
        loss = self(batch).mean()
        return loss if loss.item() > 3 else 2 * loss


class AsksTheTrainer(Good):
    def training_step(self, batch, batch_idx):
        return self(batch).mean() * self.trainer.world_size


class FailsToConfigure(Good):
    def configure_model(self) -> None:
        raise RuntimeError("cannot be configured")


class Exits(Good):
    def __init__(self) -> None:
        sys.exit(7)


class NoParameters(LightningModule):
    def training_step(self, batch, batch_idx):
        return batch.sum()


class NoStep(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
