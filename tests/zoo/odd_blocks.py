"""Blocks without attention that are written in unusual ways: each takes and gives activations of one shape."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from tests.zoo.odd_attention import WIDTH
from tests.zoo.registry import member


@member("tensor", because="A gate and a value as halves of one product.")
class Gated(nn.Module):
    def __init__(self, width=16, hidden=24):
        super().__init__()
        self.inner, self.out = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x):
        value, gate = self.inner(x).chunk(2, -1)
        return self.out(value * gate.sigmoid())


@member("tensor", because="One layer used two times.")
class Twice(nn.Module):
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


@member("tensor", because="Linears with low-rank side paths, as adapters add them.")
class Adapted(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up, self.down = Adapter(width, 64), Adapter(64, width)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


@member("tensor", because="Convolutions over positions: there is no product to split.")
class Conv(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.a, self.b = nn.Conv1d(width, 32, 3, padding=1), nn.Conv1d(32, width, 3, padding=1)

    def forward(self, x):
        return self.b(F.relu(self.a(x.transpose(1, 2)))).transpose(1, 2)


@member("tensor", because="Mixes positions, then channels.")
class Mixer(nn.Module):
    def __init__(self, width=16, length=8):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_positions = nn.Sequential(nn.Linear(length, 32), nn.GELU(), nn.Linear(32, length))
        self.over_channels = nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))

    def forward(self, x):
        x = x + self.over_positions(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.n2(x))


@member("tensor", because="An LSTM, which no split computes.")
class Recurrent(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.lstm, self.out = nn.LSTM(width, 16, batch_first=True), nn.Linear(16, width)

    def forward(self, x):
        return self.out(self.lstm(x)[0])


@member("tensor", because="A norm over groups of the hidden dimension.")
class Grouped(nn.Module):
    def __init__(self, width=16, hidden=64):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(width, hidden), nn.GroupNorm(4, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.b(self.norm(self.a(x).transpose(1, 2)).transpose(1, 2))


@member("tensor", because="A norm over the whole hidden dimension.")
class Normed(nn.Module):
    def __init__(self, width=16, hidden=64):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(width, hidden), nn.LayerNorm(hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return self.b(self.norm(self.a(x)))


@member("tensor", because="Each token goes to the better one of several MLPs.")
class Experts(nn.Module):
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


@member("tensor", because="A learned factor for each channel of the branch, and norms before and after.")
class LayerScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down, self.gamma = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x + self.gamma * self.after(self.down(F.gelu(self.up(self.before(x)))))


@member("tensor", because="The bias of the second product is a parameter of the module around it.")
class BiasAfter(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.b1 = nn.Parameter(torch.randn(WIDTH, 48) / 4), nn.Parameter(torch.randn(48))
        self.w2, self.b2 = nn.Parameter(torch.randn(48, WIDTH) / 7), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        return (x @ self.w1 + self.b1).relu() @ self.w2 + self.b2


@member("tensor", because="The second product's result is scaled inside of the module.")
class ScaleAfter(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(WIDTH, 48) / 4), nn.Parameter(torch.randn(48, WIDTH) / 7)
        self.scale = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        return (x @ self.w1).relu() @ self.w2 * self.scale


@member("tensor", because="The second matrix is the first one, turned.")
class Transposed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, WIDTH) / 4)

    def forward(self, x):
        return F.linear(F.gelu(F.linear(x, self.weight)), self.weight.t())


@member("tensor", because="Weights that a parametrization computes from a norm.")
class WeightNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = parametrizations.weight_norm(nn.Linear(WIDTH, 48))
        self.down = parametrizations.weight_norm(nn.Linear(48, WIDTH))

    def forward(self, x):
        return self.down(self.up(x).relu())


@member("tensor", because="A weight whose every look is a step of a power iteration.")
class SpectralNormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = parametrizations.spectral_norm(nn.Linear(WIDTH, 48)), nn.Linear(48, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).relu())


@member("tensor", because="A bilinear form over the hidden dimension.")
class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.mix, self.down = nn.Linear(WIDTH, 24), nn.Bilinear(24, 24, 24), nn.Linear(24, WIDTH)

    def forward(self, x):
        h = self.up(x)
        return self.down(self.mix(h, h))


@member("tensor", because="A recurrent layer before products that can be split.")
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


@member(
    "tensor", because="The two best of several experts, with weights; gives its balance loss too late to matter here."
)
class TopTwo(nn.Module):
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


@member("tensor", because="More experts than a short sequence has tokens for.")
class ManyExperts(nn.Module):
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


@member("tensor", because="Every expert in one tensor, every token through every expert.")
class StackedExperts(nn.Module):
    def __init__(self, count=4):
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.up = nn.Parameter(torch.randn(count, WIDTH, 24) / 4)
        self.down = nn.Parameter(torch.randn(count, 24, WIDTH) / 5)

    def forward(self, x):
        h = torch.einsum("btc,ech->beth", x, self.up).relu()
        return torch.einsum("beth,ehc,bte->btc", h, self.down, self.router(x).softmax(-1))


@member("tensor", because="A convolution over positions, one filter for each hidden channel.")
class Depthwise(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.conv = nn.Conv1d(48, 48, 3, padding=1, groups=48)

    def forward(self, x):
        return x + self.down(F.gelu(self.conv(self.up(x).transpose(1, 2)).transpose(1, 2)))


@member("tensor", because="Batch norm over the hidden dimension, with statistics as buffers.")
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


@member("tensor", because="An activation with a backward of its own.")
class OwnFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x):
        return x + self.down(Square.apply(self.up(x)))


@member("tensor", because="Channels of the hidden dimension are scaled by what all of them say.")
class Excited(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.squeeze, self.expand = nn.Linear(48, 12), nn.Linear(12, 48)

    def forward(self, x):
        h = self.up(x).relu()
        return x + self.down(h * self.expand(self.squeeze(h.mean(1, keepdim=True)).relu()).sigmoid())


@member("tensor", because="A softmax over the hidden dimension, which no split of it computes.")
class Softmaxed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).softmax(-1))


@member("tensor", because="Hidden channels change places.")
class Shuffled(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.register_buffer("order", torch.randperm(48, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        return x + self.down(self.up(x).relu()[..., self.order])


@member("tensor", because="Hidden channels see their neighbours.")
class Rolled(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, x):
        h = self.up(x).relu()
        return x + self.down(h + h.roll(1, -1))
