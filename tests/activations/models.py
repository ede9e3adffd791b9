"""Modules whose blocks are hard to compute again: dropout, noise from Python, buffers, writes in place."""

import random

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.base import Base


class Attention(nn.Module):
    """A transformer block with dropout in every place."""

    def __init__(self, width=16, heads=4, rate=0.1):
        super().__init__()
        self.heads, self.rate = heads, rate
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(rate)

    def forward(self, x, scale=None):
        batch, length, width = x.shape
        h = self.norm1(x)
        q, k, v = (
            layer(h).view(batch, length, -1, width // self.heads).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        rate = self.rate if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=rate)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(2)))
        x = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return x if scale is None else x * scale


class Tokens(Base):
    rate = 0.1
    depth = 4

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Attention(rate=self.rate) for _ in range(self.depth))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32)

    def tensors(self):
        return [torch.randint(0, 32, (self.samples, 12), generator=torch.Generator().manual_seed(3))]

    def logits(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, scale=x.new_ones(()))
        return self.head(self.norm(x))

    def loss(self, batch):
        (tokens,) = batch
        logits = self.logits(tokens[:, :-1])
        return F.cross_entropy(logits.reshape(-1, 32), tokens[:, 1:].reshape(-1))


class Plain(Tokens):
    rate = 0.0


class Odd(nn.Module):
    """Draws from Python, reads a buffer that it changes, keeps statistics, and writes to results of products."""

    def __init__(self, width=16):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("centre", torch.zeros(width))

    def forward(self, x):
        h = self.first(x)
        h *= 1 + random.random()
        h = self.norm(h.relu()) - self.centre
        if self.training:
            self.centre.lerp_(x.detach().mean(0), 0.1)
        y = self.second(h)
        y += self.third(self.dropout(h))
        return x + torch.tanh(y)


class OddOnes(Base):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Odd() for _ in range(4)))
        self.head = nn.Linear(16, 3)

    def tensors(self):
        random_ = torch.Generator().manual_seed(5)
        return [
            torch.randn(self.samples, 16, generator=random_),
            torch.randint(0, 3, (self.samples,), generator=random_),
        ]

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.head(self.blocks(x)), y)


class Wide(Tokens):
    """Large enough for activations to fill the memory of a step."""

    batch_size, samples, rate, depth, width, length = 8, 32, 0.0, 8, 64, 64

    def __init__(self):
        Base.__init__(self)
        self.embed = nn.Embedding(32, self.width)
        self.blocks = nn.ModuleList(Attention(self.width, rate=self.rate) for _ in range(self.depth))
        self.norm, self.head = nn.LayerNorm(self.width), nn.Linear(self.width, 32)

    def tensors(self):
        generator = torch.Generator().manual_seed(3)
        return [torch.randint(0, 32, (self.samples, self.length + 1), generator=generator)]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
