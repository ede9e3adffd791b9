"""A Hugging Face causal LM and a classifier in plain LightningModules, built from a config: nothing is downloaded.

To finetune a real checkpoint, replace `from_config` by `from_pretrained("...")`; nothing else changes.

One device:        python examples/hf_finetune.py
Two, ZeRO 3:       python examples/hf_finetune.py --strategy 3d_zero3 --devices 2
Tensor parallel:   python examples/hf_finetune.py --strategy 3d --tensor 2 --devices 2
"""

import sysconfig
from pathlib import Path

import torch
from common import run
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig


def tiny_llama(width: int, layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, use_cache=False,
    )  # fmt: skip


class Bytes(LightningDataModule):
    """Windows of the standard library's source, and whether each is of a file whose name begins with a to m."""

    def __init__(self, batch_size: int = 8, context: int = 64, windows: int = 2000) -> None:
        super().__init__()
        self.batch_size, self.context, self.windows = batch_size, context, windows

    def setup(self, stage: str) -> None:
        rows, labels = [], []
        for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
            text = torch.frombuffer(bytearray(file.read_bytes() or b" "), dtype=torch.uint8)
            cut = text[: len(text) // self.context * self.context].view(-1, self.context)[:20].long()
            rows.append(cut)
            labels += [int(file.name.lower() < "n")] * len(cut)
        self.samples = TensorDataset(torch.cat(rows)[: self.windows], torch.tensor(labels)[: self.windows])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.samples, batch_size=self.batch_size, shuffle=True, drop_last=True)


class CausalLM(LightningModule):
    """Predicts the next byte."""

    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_config(tiny_llama(width, layers))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, _ = batch
        loss = self.model(input_ids=tokens, labels=tokens).loss
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class TextClassifier(LightningModule):
    """A head of its own on the mean of the last hidden states."""

    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.body, self.head = AutoModel.from_config(tiny_llama(width, layers)), torch.nn.Linear(width, 2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, labels = batch
        loss = F.cross_entropy(self.head(self.body(input_ids=tokens).last_hidden_state.mean(1)), labels)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    run(CausalLM, Bytes, __doc__)
