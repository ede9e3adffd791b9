"""A byte-level GPT, trained on the source of Python's own standard library. A plain LightningModule.

One device:      python examples/gpt_from_scratch.py
Two, ZeRO 1:     python examples/gpt_from_scratch.py --strategy 3d_zero1 --devices 2
Four, 3D:        python examples/gpt_from_scratch.py --strategy 3d --tensor 2 --pipeline 2 --devices 4
"""

import sysconfig
from pathlib import Path

import torch
from common import run
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attend(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = self.qkv(x).split(self.width, dim=2)
        q, k, v = (y.view(batch, time, self.heads, self.width // self.heads).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, time, self.width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class ByteGPT(LightningModule):
    """Predicts the next byte. The embedding is also the output head."""

    def __init__(self, width: int = 128, heads: int = 4, layers: int = 4, context: int = 128, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)
        self.head.weight = self.embed.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text) + self.position(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


class Windows(Dataset[Tensor]):
    """Every `context + 1` bytes of some text."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text, self.length = torch.frombuffer(bytearray(text), dtype=torch.uint8), context + 1

    def __len__(self) -> int:
        return len(self.text) // self.length

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * self.length : (index + 1) * self.length].long()


class StandardLibrary(LightningDataModule):
    """The source files of the running Python, up to `limit` bytes.

    Args:
        batch_size: samples of one optimizer step over all data ranks together.
    """

    def __init__(self, batch_size: int = 16, context: int = 128, limit: int = 1_000_000) -> None:
        super().__init__()
        self.batch_size, self.context, self.limit = batch_size, context, limit

    def setup(self, stage: str) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files)[: self.limit]
        self.windows = Windows(text, self.context)

    def train_dataloader(self) -> DataLoader[Tensor]:
        assert self.trainer is not None
        ranks = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler = DistributedSampler(self.windows, shuffle=True, seed=0, **ranks)
        return DataLoader(self.windows, batch_size=self.batch_size // ranks["num_replicas"], sampler=sampler)


if __name__ == "__main__":
    run(ByteGPT, StandardLibrary, __doc__)
