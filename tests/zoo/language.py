"""Modules on sequences, with batches of their own."""

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.base import Base
from tests.zoo.registry import member


@member("tensor", "pipeline", "zero", because="torch's own encoder, with a frozen position table.")
class Encoder(Base):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.positions = nn.Parameter(torch.randn(1, 6, 16), requires_grad=False)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def tensors(self):
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(self.samples, 6, 16, generator=generator)
        return x, x.mean((1, 2)).mul(20).long().remainder(5)

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.head(self.encoder(x + self.positions).mean(1)), y)


class Block(nn.Module):
    """A nanoGPT-style block: fused attention, sizes hard-coded in views."""

    def __init__(self, width, heads):
        super().__init__()
        self.n_embd, self.n_head = width, heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attend(self, x):
        b, t, _ = x.shape
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(b, t, self.n_head, self.n_embd // self.n_head).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, t, self.n_embd))

    def forward(self, x):
        x = x + self.attend(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


@member(
    "tensor", "pipeline", "zero", because="nanoGPT: a tied head, blocks in a ModuleList, sizes as literals in views."
)
class GPT(Base):
    vocabulary = 29
    tied = True

    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(self.vocabulary, 16), nn.Embedding(8, 16)
        self.blocks = nn.ModuleList([Block(16, 4) for _ in range(3)])
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, self.vocabulary, bias=False)
        if self.tied:
            self.head.weight = self.embed.weight

    def tensors(self):
        generator = torch.Generator().manual_seed(3)
        return (torch.randint(0, self.vocabulary, (self.samples, 9), generator=generator),)

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch):
        (tokens,) = batch
        return F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@member(
    "tensor",
    "pipeline",
    "zero",
    because="The same with a head of its own: no tie that keeps the first stage and the last one in step.",
)
class UntiedGPT(GPT):
    tied = False


@member("tensor", "pipeline", "zero", because="A model of Hugging Face that computes its own loss.")
class Llama(Base):
    length = 8

    def __init__(self):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=37, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=16, use_cache=False,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    def tensors(self):
        generator = torch.Generator().manual_seed(5)
        return (torch.randint(0, 37, (self.samples, self.length), generator=generator),)

    def loss(self, batch):
        (tokens,) = batch
        return self.model(input_ids=tokens, labels=tokens).loss
