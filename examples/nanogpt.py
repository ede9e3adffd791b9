"""A GPT-2 as small codebases write it: one fused matrix for q, k and v, a config object, tied head, two groups of
parameters and a cosine schedule. A plain LightningModule, on the bytes of Python's own standard library.

One device:            python examples/nanogpt.py
Tensor x pipeline:     python examples/nanogpt.py --strategy 3d --tensor 2 --pipeline 2 --devices 4
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from common import run
from gpt_from_scratch import StandardLibrary
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    dropout: float
    vocab_size: int = 256


class CausalSelfAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head, self.n_embd, self.dropout = config.n_head, config.n_embd, config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C)))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(config.n_embd), CausalSelfAttention(config)
        self.ln_2, self.mlp = nn.LayerNorm(config.n_embd), MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(LightningModule):
    def __init__(
        self, width: int = 128, heads: int = 4, layers: int = 4, context: int = 128, dropout: float = 0.0,
        lr: float = 1e-3, warmup: int = 10, decay: int = 200,
    ) -> None:  # fmt: skip
        super().__init__()
        self.save_hyperparameters()
        self.config = config = GPTConfig(context, layers, heads, width, dropout)
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, width),
                "wpe": nn.Embedding(context, width),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList([Block(config) for _ in range(layers)]),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith("c_proj.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if residual else 0.02)

    def forward(self, idx: Tensor) -> Tensor:
        position = torch.arange(idx.size(1), device=idx.device)
        x = self.transformer["drop"](self.transformer["wte"](idx) + self.transformer["wpe"](position))
        for block in self.transformer["h"]:
            x = block(x)
        return self.lm_head(self.transformer["ln_f"](x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = self(batch[:, :-1])
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), batch[:, 1:].reshape(-1))
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        matrices = [parameter for parameter in self.parameters() if parameter.ndim >= 2]
        others = [parameter for parameter in self.parameters() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["lr"], betas=(0.9, 0.95))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.share_of_lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def share_of_lr(self, step: int) -> float:
        """Up in a line, then down to a tenth along a cosine."""
        if step < self.hparams["warmup"]:
            return (step + 1) / self.hparams["warmup"]
        done = min(1.0, (step - self.hparams["warmup"]) / self.hparams["decay"])
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


if __name__ == "__main__":
    run(NanoGPT, StandardLibrary, __doc__)
