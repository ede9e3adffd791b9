"""Blocks that are written in unusual ways."""

import math

import torch
import torch.nn.functional as F
from torch import nn


class Parallel(nn.Module):
    """Attention and MLP side by side, as in GPT-J, with hand-written rotary positions and a chunked matrix."""

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


class Alibi(nn.Module):
    """Position slopes made from the number of heads in the forward."""

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


class Einsum(nn.Module):
    """No nn.Linear at all."""

    def __init__(self, width=16, heads=4, size=4):
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(width, heads, size) / 4) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(heads, size, width) / 4)

    def forward(self, x):
        q, k, v = (torch.einsum("btc,chd->bhtd", x, w) for w in (self.wq, self.wk, self.wv))
        return torch.einsum("bhtd,hdc->btc", F.scaled_dot_product_attention(q, k, v), self.wo)


class Gated(nn.Module):
    def __init__(self, width=16, hidden=24):
        super().__init__()
        self.inner, self.out = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x):
        value, gate = self.inner(x).chunk(2, -1)
        return self.out(value * gate.sigmoid())


class HeadNorm(nn.Module):
    """Norms inside attention: over a head, or over all of them."""

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


class Twice(nn.Module):
    """One layer used two times."""

    def __init__(self, width=16):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, width))

    def forward(self, x):
        return self.mlp(x + self.mlp(x))


class Adapter(nn.Module):
    """A linear with a low-rank side path."""

    def __init__(self, inputs, outputs, rank=2):
        super().__init__()
        self.base, self.a, self.b = (
            nn.Linear(inputs, outputs),
            nn.Linear(inputs, rank, bias=False),
            nn.Linear(rank, outputs, bias=False),
        )
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x)) * 2.0


class Adapted(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up, self.down = Adapter(width, 64), Adapter(64, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Conv(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.a, self.b = nn.Conv1d(width, 32, 3, padding=1), nn.Conv1d(32, width, 3, padding=1)

    def forward(self, x):
        return self.b(F.relu(self.a(x.transpose(1, 2)))).transpose(1, 2)


class Mixer(nn.Module):
    """Mixes positions, then channels."""

    def __init__(self, width=16, length=8):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_positions = nn.Sequential(nn.Linear(length, 32), nn.GELU(), nn.Linear(32, length))
        self.over_channels = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x):
        x = x + self.over_positions(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.n2(x))


class Recurrent(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.lstm, self.out = nn.LSTM(width, 16, batch_first=True), nn.Linear(16, width)

    def forward(self, x):
        return self.out(self.lstm(x)[0])


class Grouped(nn.Module):
    """A norm over groups of the hidden dimension."""

    def __init__(self, width=16, hidden=64):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(width, hidden), nn.GroupNorm(4, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.b(self.norm(self.a(x).transpose(1, 2)).transpose(1, 2))


class Normed(nn.Module):
    """A norm over the whole hidden dimension."""

    def __init__(self, width=16, hidden=64):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.b(self.norm(self.a(x)))


class Experts(nn.Module):
    """Each token goes to the better one of several MLPs."""

    def __init__(self, width=16, count=3):
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, width)) for _ in range(count)
        )

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            here = chosen == index
            out[here] = expert(x[here])
        return out * weights[..., None]


class Interleaved(nn.Module):
    """Heads are the fast dimension: neighbouring channels belong to different heads."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads, self.qkv, self.o = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (-1, self.heads)).permute(0, 3, 1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.o(y.permute(0, 2, 3, 1).flatten(2))


class Flat(nn.Module):
    """Norm, products and residual in one forward with bare parameters."""

    def __init__(self, width=16, hidden=64):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))
        self.w1, self.w2 = nn.Parameter(torch.randn(hidden, width) / 4), nn.Parameter(torch.randn(width, hidden) / 8)

    def forward(self, x):
        return x + F.linear(F.gelu(F.linear(F.layer_norm(x, x.shape[-1:], self.scale), self.w1)), self.w2)
