"""An encoder-decoder that learns to write a sequence backwards. A plain LightningModule.

One device:        python examples/encoder_decoder.py
Tensor parallel:   python examples/encoder_decoder.py --strategy 3d --tensor 2 --devices 2
"""

import torch
from common import run
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

START = 0


class Reversals(LightningDataModule):
    """Random words and the same words backwards."""

    def __init__(self, batch_size: int = 32, length: int = 8, words: int = 2000) -> None:
        super().__init__()
        self.batch_size, self.length, self.words = batch_size, length, words

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(0)
        word = torch.randint(1, 20, (self.words, self.length), generator=generator)
        self.samples = TensorDataset(word, word.flip(1))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.samples, batch_size=self.batch_size, shuffle=True, drop_last=True)


class Reverser(LightningModule):
    """torch's own encoder and decoder layers."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(20, width), nn.Embedding(16, width)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, **options) for _ in range(layers)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, heads, 4 * width, **options) for _ in range(layers)
        )
        self.head = nn.Linear(width, 20)

    def place(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, y = self.place(source), self.place(target)
        for layer in self.encoder:
            memory = layer(memory)
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        for layer in self.decoder:
            y = layer(y, memory, tgt_mask=mask)
        return self.head(y)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        source, target = batch
        shifted = F.pad(target[:, :-1], (1, 0), value=START)
        loss = F.cross_entropy(self(source, shifted).flatten(0, 1), target.flatten())
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


if __name__ == "__main__":
    run(Reverser, Reversals, __doc__)
