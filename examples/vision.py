"""Handwritten digits (scikit-learn ships them), read by a small vision transformer or a convnet.

One device:        python examples/vision.py
Tensor parallel:   python examples/vision.py --strategy 3d --tensor 2 --devices 2
"""

import torch
from common import run
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Digits(LightningDataModule):
    """1797 images of 8 x 8."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
        self.samples = TensorDataset(images, torch.tensor(digits.target, dtype=torch.long))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.samples, batch_size=self.batch_size, shuffle=True, drop_last=True)


class Classifier(LightningModule):
    """What both networks share."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class VisionTransformer(Classifier):
    """Patches of 2 x 2 pixels through torch's own encoder layers."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=2, stride=2)
        self.position = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class ConvNet(Classifier):
    """Convolutions with batch norm."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, stride=2), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.Flatten(), nn.Linear(2 * width * 9, 10),
        )  # fmt: skip

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)


if __name__ == "__main__":
    run(VisionTransformer, Digits, __doc__)
