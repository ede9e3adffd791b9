"""More blocks as somebody might write them by hand: each takes and gives activations of one shape."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

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


class MultiQuery(Attention):
    """Many queries, one key and value."""

    def __init__(self):
        super().__init__()
        self.k, self.v = nn.Linear(WIDTH, WIDTH // HEADS), nn.Linear(WIDTH, WIDTH // HEADS)

    def parts(self, x):
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return q, self.k(x).unsqueeze(1), self.v(x).unsqueeze(1)


class RelativeBias(Attention):
    """A learned bias for each head and distance, in a table."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(33, HEADS)

    def scores(self, q, k):
        place = torch.arange(q.shape[2])
        return super().scores(q, k) + self.table(place[:, None] - place + 16).permute(2, 0, 1)


class BiasParameter(Attention):
    """A learned bias for each head and pair of positions."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.randn(1, HEADS, 32, 32))

    def scores(self, q, k):
        return super().scores(q, k) + self.bias[:, :, : q.shape[2], : q.shape[2]]


class Sinks(Attention):
    """A learned score for each head that belongs to no position."""

    def __init__(self):
        super().__init__()
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x):
        q, k, v = self.parts(x)
        sinks = self.sinks.view(1, -1, 1, 1).expand(x.shape[0], -1, x.shape[1], 1)
        weights = torch.cat([self.scores(q, k), sinks], -1).softmax(-1)[..., :-1]
        return x + self.o((weights @ v).transpose(1, 2).flatten(2))


class HeadScale(Attention):
    """Cosine scores with a learned temperature for each head, and a factor for each head's result."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))
        self.gain = nn.Parameter(torch.ones(HEADS, 1, 1))

    def scores(self, q, k):
        return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * self.temperature.exp()

    def parts(self, x):
        q, k, v = super().parts(x)
        return q, k, v * self.gain


class WholeNorm(Attention):
    """Queries and keys are normed over all heads at once."""

    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)

    def parts(self, x):
        q, k, v = self.q_norm(self.q(x)), self.k_norm(self.k(x)), self.v(x)
        return (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))


class Latent(nn.Module):
    """Keys and values from a latent of which a part is a key for all heads, as in DeepSeek's."""

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


class Linearized(Attention):
    """No softmax: a product of keys and values, then of queries with it."""

    def forward(self, x):
        q, k, v = self.parts(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return x + self.o((q @ (k.transpose(-2, -1) @ v)).transpose(1, 2).flatten(2))


class SharedKeys(Attention):
    """Keys are queries."""

    def parts(self, x):
        q, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.v))
        return q, q, v


class HeadsFirst(nn.Module):
    """Packed head by head."""

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


class Folded(Attention):
    """Rows and heads in one dimension, as before there was a fused kernel."""

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


class Recomputed(Attention):
    """Runs its own attention again in backward."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False) if self.training else super().forward(x)


class LayerScale(nn.Module):
    """A learned factor for each channel of the branch, and norms before and after."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down, self.gamma = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x + self.gamma * self.after(self.down(F.gelu(self.up(self.before(x)))))


class BiasAfter(nn.Module):
    """The bias of the second product is a parameter of the module around it."""

    def __init__(self):
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(WIDTH, 48) / 4), nn.Parameter(torch.randn(48))
        self.w2, self.b2 = nn.Parameter(torch.randn(48, WIDTH) / 7), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return (x @ self.w1 + self.b1).relu() @ self.w2 + self.b2


class ScaleAfter(nn.Module):
    """The second product's result is scaled inside of the module."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(WIDTH, 48) / 4), nn.Parameter(torch.randn(48, WIDTH) / 7)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return (x @ self.w1).relu() @ self.w2 * self.scale


class Transposed(nn.Module):
    """The second matrix is the first one, turned."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, WIDTH) / 4)

    def forward(self, x):
        return F.linear(F.gelu(F.linear(x, self.weight)), self.weight.t())


class WeightNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = parametrizations.weight_norm(nn.Linear(WIDTH, 48))
        self.down = parametrizations.weight_norm(nn.Linear(48, WIDTH))

    def forward(self, x):
        return self.down(self.up(x).relu())


class SpectralNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = parametrizations.spectral_norm(nn.Linear(WIDTH, 48)), nn.Linear(48, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.mix, self.down = nn.Linear(WIDTH, 24), nn.Bilinear(24, 24, 24), nn.Linear(24, WIDTH)

    def forward(self, x):
        h = self.up(x)
        return self.down(self.mix(h, h))


class Gru(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.up, self.down = (
            nn.GRU(WIDTH, WIDTH, batch_first=True),
            nn.Linear(WIDTH, 48),
            nn.Linear(48, WIDTH),
        )

    def forward(self, x):
        return x + self.down(self.up(self.rnn(x)[0]).tanh())


class TopTwo(nn.Module):
    """The two best of several experts, with weights; gives its balance loss too late to matter here."""

    def __init__(self, count=4):
        super().__init__()
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(WIDTH, 24), "gate": nn.Linear(WIDTH, 24), "down": nn.Linear(24, WIDTH)})
            for _ in range(count)
        )

    def forward(self, x):
        flat = x.reshape(-1, WIDTH)
        weights, chosen = self.router(flat).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if len(rows):
                h = expert["up"](flat[rows]) * expert["gate"](flat[rows]).sigmoid()
                out.index_add_(0, rows, expert["down"](h) * weights[rows, place, None])
        return x + out.view_as(x)


class ManyExperts(nn.Module):
    """More experts than a short sequence has tokens for."""

    def __init__(self, count=24):
        super().__init__()
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH)) for _ in range(count)
        )

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number in chosen.unique().tolist():
            here = chosen == number
            out[here] = self.experts[number](x[here]) * weights[here][:, None]
        return x + out


class StackedExperts(nn.Module):
    """Every expert in one tensor, every token through every expert."""

    def __init__(self, count=4):
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.up = nn.Parameter(torch.randn(count, WIDTH, 24) / 4)
        self.down = nn.Parameter(torch.randn(count, 24, WIDTH) / 5)

    def forward(self, x):
        h = torch.einsum("btc,ech->beth", x, self.up).relu()
        return torch.einsum("beth,ehc,bte->btc", h, self.down, self.router(x).softmax(-1))


class Depthwise(nn.Module):
    """A convolution over positions, one filter for each hidden channel."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.conv = nn.Conv1d(48, 48, 3, padding=1, groups=48)

    def forward(self, x):
        return x + self.down(F.gelu(self.conv(self.up(x).transpose(1, 2)).transpose(1, 2)))


class BatchNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, 48), nn.BatchNorm1d(48), nn.Linear(48, WIDTH)

    def forward(self, x):
        return x + self.down(self.norm(self.up(x).transpose(1, 2)).relu().transpose(1, 2))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class OwnFunction(nn.Module):
    """An activation with a backward of its own."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x):
        return x + self.down(Square.apply(self.up(x)))


class Excited(nn.Module):
    """Channels of the hidden dimension are scaled by what all of them say."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.squeeze, self.expand = nn.Linear(48, 12), nn.Linear(12, 48)

    def forward(self, x):
        h = self.up(x).relu()
        return x + self.down(h * self.expand(self.squeeze(h.mean(1, keepdim=True)).relu()).sigmoid())


class Softmaxed(nn.Module):
    """A softmax over the hidden dimension, which no split of it computes."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).softmax(-1))


class Shuffled(nn.Module):
    """Hidden channels change places."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.register_buffer("order", torch.randperm(48, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        return x + self.down(self.up(x).relu()[..., self.order])


class Rolled(nn.Module):
    """Hidden channels see their neighbours."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x):
        h = self.up(x).relu()
        return x + self.down(h + h.roll(1, -1))


class Decoder(nn.Module):
    """torch's own decoder layer on itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 48, 0.0, batch_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.layer(x, x.flip(1), tgt_mask=mask)


class HeadMasks(nn.Module):
    """torch's own attention with a mask for each row and head."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x):
        mask = torch.ones(x.shape[0] * HEADS, x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
