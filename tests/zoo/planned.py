"""Modules that the planner's tests give to it."""

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.zoo.registry import member
from tests.zoo.sized import GPT


@member("planned", because="The planner's own description of a transformer, as a module without dropout.")
class TinyGPT(GPT):
    def __init__(self, width: int = 32, heads: int = 4, layers: int = 3, vocabulary: int = 64, context: int = 16):
        super().__init__(width, layers, vocabulary, context, heads)


@member("planned", because="No chain of equal blocks, images in.")
class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.zeros(4, 3, 8, 8)
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.head = nn.Linear(5 * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x)).flatten(1))


class NotAModule:
    pass


@member("planned", because="Finetuning: all frozen save the last block.")
class LastBlockTrained(TinyGPT):
    def __init__(self) -> None:
        super().__init__(layers=4)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith("blocks.3."))


@member("planned", because="An initializer that draws until no value is out of bounds; a head declared before blocks.")
class HeadFirst(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.head, self.first = nn.Linear(8, 2), nn.Linear(4, 8)
        self.blocks = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.blocks(self.first(batch))).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())

    def train_dataloader(self) -> DataLoader:
        return DataLoader([torch.ones(4, 4)] * 4, batch_size=None)
