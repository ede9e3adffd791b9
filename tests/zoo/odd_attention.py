"""Attention written in unusual ways: each block takes and gives activations of one shape."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.registry import member

WIDTH, HEADS = 16, 4


def linears(count, width=WIDTH, bias=True):
    return (nn.Linear(width, width, bias=bias) for _ in range(count))


class Attention(nn.Module):
    """What the ones below have in common."""

    def __init__(self):
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v, self.o = linears(4)

    def parts(self, x):
        return (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))

    def scores(self, q, k):
        return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])

    def forward(self, x):
        q, k, v = self.parts(x)
        return x + self.o((self.scores(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2))


@member(
    "tensor",
    because="Attention and MLP side by side, as in GPT-J, with hand-written rotary positions and a chunked matrix.",
)
class Parallel(nn.Module):
    def __init__(self, width=16, heads=4):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 64), nn.Linear(64, width)

    def rotate(self, x):
        a, b = x.chunk(2, -1)
        angle = torch.arange(x.shape[-2])[:, None] / 10 ** (torch.arange(a.shape[-1]) / a.shape[-1])
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        scores = torch.einsum("bhid,bhjd->bhij", self.rotate(q), self.rotate(k)) / math.sqrt(q.shape[-1])
        y = torch.einsum("bhij,bhjd->bihd", scores.softmax(-1), v).flatten(2)
        return x + self.out(y) + self.down(F.silu(self.up(h)))


@member("tensor", because="Position slopes made from the number of heads in the forward.")
class Alibi(nn.Module):
    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads, self.q, self.k, self.v, self.o = heads, *(nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        B, T, _C = x.shape
        q, k, v = (f(x).view(B, T, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        slopes = 2.0 ** -torch.arange(1, self.heads + 1)
        bias = slopes[:, None, None] * (torch.arange(T)[None, :] - torch.arange(T)[:, None])
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return x + self.o(y.transpose(1, 2).reshape(B, T, -1))


@member("tensor", because="No nn.Linear at all.")
class Einsum(nn.Module):
    def __init__(self, width=16, heads=4, size=4):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(width, heads, size) / 4) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(heads, size, width) / 4)

    def forward(self, x):
        q, k, v = (torch.einsum("btc,chd->bhtd", x, w) for w in (self.wq, self.wk, self.wv))
        return torch.einsum("bhtd,hdc->btc", F.scaled_dot_product_attention(q, k, v), self.wo)


@member("tensor", because="Norms inside attention: over a head, or over all of them.")
class HeadNorm(nn.Module):
    def __init__(self, width=16, heads=4, over_all=False):
        super().__init__()
        self.heads, self.over_all = heads, over_all
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.norm = nn.RMSNorm(width if over_all else width // heads)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        q = self.norm(q) if self.over_all else q
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        q, k = (q, k) if self.over_all else (self.norm(q), self.norm(k))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@member("tensor", because="Heads are the fast dimension: neighbouring channels belong to different heads.")
class Interleaved(nn.Module):
    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads, self.qkv, self.o = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, self.heads)).permute(0, 3, 1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.permute(0, 2, 3, 1).flatten(2))


@member("tensor", because="Norm, products and residual in one forward with bare parameters.")
class Flat(nn.Module):
    def __init__(self, width=16, hidden=64):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.w1, self.w2 = nn.Parameter(torch.randn(hidden, width) / 4), nn.Parameter(torch.randn(width, hidden) / 8)

    def forward(self, x):
        return x + F.linear(F.gelu(F.linear(F.layer_norm(x, x.shape[-1:], self.scale), self.w1)), self.w2)


@member("tensor", because="Many queries, one key and value.")
class MultiQuery(Attention):
    def __init__(self):
        super().__init__()
        self.k, self.v = nn.Linear(WIDTH, WIDTH // HEADS), nn.Linear(WIDTH, WIDTH // HEADS)

    def parts(self, x):
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return q, self.k(x).unsqueeze(1), self.v(x).unsqueeze(1)


@member("tensor", because="A learned bias for each head and distance, in a table.")
class RelativeBias(Attention):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(33, HEADS)

    def scores(self, q, k):
        place = torch.arange(q.shape[2])
        return super().scores(q, k) + self.table(place[:, None] - place + 16).permute(2, 0, 1)


@member("tensor", because="A learned bias for each head and pair of positions.")
class BiasParameter(Attention):
    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, HEADS, 32, 32))

    def scores(self, q, k):
        return super().scores(q, k) + self.bias[:, :, : q.shape[2], : q.shape[2]]


@member("tensor", because="A learned score for each head that belongs to no position.")
class Sinks(Attention):
    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x):
        q, k, v = self.parts(x)
        sinks = self.sinks.view(1, -1, 1, 1).expand(x.shape[0], -1, x.shape[1], 1)
        weights = torch.cat([self.scores(q, k), sinks], -1).softmax(-1)[..., :-1]
        return x + self.o((weights @ v).transpose(1, 2).flatten(2))


@member(
    "tensor", because="Cosine scores with a learned temperature for each head, and a factor for each head's result."
)
class HeadScale(Attention):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))
        self.gain = nn.Parameter(torch.ones(HEADS, 1, 1))

    def scores(self, q, k):
        return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * self.temperature.exp()

    def parts(self, x):
        q, k, v = super().parts(x)
        return q, k, v * self.gain


@member("tensor", because="Queries and keys are normed over all heads at once.")
class WholeNorm(Attention):
    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)

    def parts(self, x):
        q, k, v = self.q_norm(self.q(x)), self.k_norm(self.k(x)), self.v(x)
        return (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))


@member("tensor", because="Keys and values from a latent of which a part is a key for all heads, as in DeepSeek's.")
class Latent(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.q, self.o = HEADS, nn.Linear(WIDTH, HEADS * 6), nn.Linear(HEADS * 4, WIDTH)
        self.down, self.up, self.norm = nn.Linear(WIDTH, 8 + 2), nn.Linear(8, HEADS * 8), nn.LayerNorm(8)

    def forward(self, x):
        q = self.q(x).unflatten(-1, (self.heads, 6)).transpose(1, 2)
        latent, common = self.down(x).split([8, 2], -1)
        k, v = self.up(self.norm(latent)).unflatten(-1, (self.heads, 8)).transpose(1, 2).chunk(2, -1)
        k = torch.cat([k, common.unsqueeze(1).expand(-1, k.shape[1], -1, -1)], -1)
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@member("tensor", because="A product of keys and values, then of queries with it, over the sum of keys.")
class Linearized(Attention):
    def forward(self, x):
        q, k, v = self.parts(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        mixed = q @ (k.transpose(-2, -1) @ v) / (q @ k.sum(-2, keepdim=True).transpose(-2, -1))
        return x + self.o(mixed.transpose(1, 2).flatten(2))


@member("tensor", because="Keys are queries.")
class SharedKeys(Attention):
    def parts(self, x):
        q, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.v))
        return q, q, v


@member("tensor", because="Packed head by head.")
class HeadsFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.size, self.qkv, self.o = (
            HEADS,
            WIDTH // HEADS,
            nn.Linear(WIDTH, 3 * WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, self.heads, 3 * self.size).transpose(1, 2).chunk(3, -1)
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, -1))


@member("tensor", because="Rows and heads in one dimension, as before there was a fused kernel.")
class Folded(Attention):
    def parts(self, x):
        B, T, _ = x.shape
        return (
            f(x).view(B, T, self.heads, WIDTH // HEADS).transpose(1, 2).reshape(B * self.heads, T, WIDTH // HEADS)
            for f in (self.q, self.k, self.v)
        )

    def forward(self, x):
        B, T, _ = x.shape
        q, k, v = self.parts(x)
        y = torch.bmm(torch.bmm(q, k.transpose(1, 2)).softmax(-1), v)
        return x + self.o(y.view(B, self.heads, T, -1).transpose(1, 2).reshape(B, T, -1))


@member("tensor", because="Runs its own attention again in backward.")
class Recomputed(Attention):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False) if self.training else super().forward(x)


@member("tensor", because="torch's own decoder layer on itself.")
class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 48, 0.0, batch_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, x.flip(1), tgt_mask=mask)


@member("tensor", because="torch's own attention with a mask for each row and head.")
class HeadMasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x):
        mask = torch.ones(x.shape[0] * HEADS, x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
