"""Two views of each digit are to find each other among all of a batch: a loss that is no mean over samples.

A pipeline cuts a batch into microbatches. It finds on the first batch that such a loss needs the full one.

One device:        python examples/contrastive.py
Two stages:        python examples/contrastive.py --strategy 3d --pipeline 2 --devices 2
"""

import torch
from common import run
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from vision import Digits


class Contrastive(LightningModule):
    def __init__(self, width: int = 64, temperature: float = 0.2) -> None:
        super().__init__()
        self.temperature = temperature
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)
        )

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.net(images), dim=1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, _ = batch
        views = torch.stack([images, images.roll(1, dims=-1)], dim=1)  # each digit beside itself, moved by a pixel
        codes = self(views.flatten(0, 1)).view(len(images), 2, -1)
        likeness = codes[:, 0] @ codes[:, 1].T / self.temperature
        loss = F.cross_entropy(likeness, torch.arange(len(images), device=images.device))
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    run(Contrastive, Digits, __doc__)
