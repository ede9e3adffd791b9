"""Blocks without attention that are written in unusual ways: each takes and gives activations of one shape."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from tests.zoo.odd_attention import WIDTH
from tests.zoo.registry import member


class TwoProducts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)


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

    def called(self, chosen):
        return range(len(self.experts))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number in self.called(chosen):
            here = chosen == number
            out[here] = self.experts[number](x[here])
        return out * weights[..., None]


@member("tensor", because="An expert that no token ever reaches gets no gradient: it does not decay.")
class NeverChosen(Experts):
    def __init__(self):
        super().__init__()
        nn.init.constant_(self.router.bias[:1], -1e4)

    def called(self, chosen):
        return chosen.unique().tolist()


@member("tensor", because="A router's loss, left on the module for the step: only one device counts it once by itself.")
class Balanced(Experts):
    def forward(self, x):
        self.balance = self.router(x).softmax(-1).mean((0, 1)).square().sum()
        return super().forward(x)


@member("tensor", because="A learned factor for each channel of the branch, and norms before and after.")
class LayerScale(TwoProducts):
    def __init__(self):
        super().__init__()
        self.before, self.after, self.gamma = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Parameter(torch.ones(WIDTH))

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
class WeightNormed(TwoProducts):
    def __init__(self):
        super().__init__()
        for product in (self.up, self.down):
            parametrizations.weight_norm(product)

    def forward(self, x):
        return self.down(self.up(x).relu())


@member("tensor", because="A weight whose every look is a step of a power iteration.")
class SpectralNormed(WeightNormed):
    def __init__(self):
        super().__init__()
        self.up, self.down = parametrizations.spectral_norm(nn.Linear(WIDTH, 48)), nn.Linear(48, WIDTH)


@member("tensor", because="A bilinear form over the hidden dimension.")
class Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.mix, self.down = nn.Linear(WIDTH, 24), nn.Bilinear(24, 24, 24), nn.Linear(24, WIDTH)

    def forward(self, x):
        h = self.up(x)
        return self.down(self.mix(h, h))


@member("tensor", because="A recurrent layer before products that can be split.")
class Gru(TwoProducts):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

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
class ManyExperts(Experts):
    called = NeverChosen.called

    def __init__(self):
        super().__init__(count=24)


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


@member("tensor", because="A soft router's loss, left on the module for the step.")
class BalancedStack(StackedExperts):
    def forward(self, x):
        self.balance = self.router(x).softmax(-1).mean((0, 1)).square().sum()
        return super().forward(x)


@member("tensor", because="A convolution over positions, one filter for each hidden channel.")
class Depthwise(TwoProducts):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(48, 48, 3, padding=1, groups=48)

    def forward(self, x):
        return x + self.down(F.gelu(self.conv(self.up(x).transpose(1, 2)).transpose(1, 2)))


@member("tensor", because="Batch norm over the hidden dimension, with statistics as buffers.")
class BatchNormed(TwoProducts):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(48)

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
class OwnFunction(TwoProducts):
    def forward(self, x):
        return x + self.down(Square.apply(self.up(x)))


@member("tensor", because="Channels of the hidden dimension are scaled by what all of them say.")
class Excited(TwoProducts):
    def __init__(self):
        super().__init__()
        self.squeeze, self.expand = nn.Linear(48, 12), nn.Linear(12, 48)

    def forward(self, x):
        h = self.up(x).relu()
        return x + self.down(h * self.expand(self.squeeze(h.mean(1, keepdim=True)).relu()).sigmoid())


@member("tensor", because="A softmax over the hidden dimension, which no split of it computes.")
class Softmaxed(TwoProducts):
    def forward(self, x):
        return x + self.down(self.up(x).softmax(-1))


@member("tensor", because="Hidden channels change places.")
class Shuffled(TwoProducts):
    def __init__(self):
        super().__init__()
        self.register_buffer("order", torch.randperm(48, generator=torch.Generator().manual_seed(0)))

    def forward(self, x):
        return x + self.down(self.up(x).relu()[..., self.order])


@member("tensor", because="Hidden channels see their neighbours.")
class Rolled(TwoProducts):
    def forward(self, x):
        h = self.up(x).relu()
        return x + self.down(h + h.roll(1, -1))


@member("tensor", because="A state space: steps, inputs and outputs of the state are computed from all its channels.")
class StateSpace(nn.Module):
    """The mixer of Mamba: a convolution for each channel, and a matrix that is read where its module is not called."""

    def __init__(self, inner=32, state=4, rank=2, window=4):
        super().__init__()
        self.state, self.rank, self.window = state, rank, window
        self.enter, self.leave = nn.Linear(WIDTH, 2 * inner, bias=False), nn.Linear(inner, WIDTH, bias=False)
        self.conv = nn.Conv1d(inner, inner, window, groups=inner, padding=window - 1)
        self.select, self.step = nn.Linear(inner, rank + 2 * state, bias=False), nn.Linear(rank, inner)
        self.log_decay = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))

    def forward(self, x):
        signal, gate = self.enter(x).transpose(1, 2).chunk(2, dim=1)
        signal = F.silu(self.conv(signal)[..., : x.shape[1]])
        chosen = self.select(signal.transpose(1, 2).reshape(-1, signal.shape[1]))
        low, b, c = chosen.split([self.rank, self.state, self.state], dim=-1)
        step = (self.step.weight @ low.t()).unflatten(1, (len(x), -1)).transpose(0, 1)  # batch, channel, position
        step = F.softplus(step + self.step.bias[:, None])
        b, c = b.unflatten(0, (len(x), -1)), c.unflatten(0, (len(x), -1))
        decay = torch.exp(step[..., None] * -self.log_decay.exp()[:, None])
        driven = step[..., None] * b[:, None] * signal[..., None]
        h, out = torch.zeros_like(driven[:, :, 0]), []
        for at in range(x.shape[1]):
            h = decay[:, :, at] * h + driven[:, :, at]
            out.append((h * c[:, None, at]).sum(-1))
        y = torch.stack(out, -1) + self.skip[:, None] * signal
        return x + self.leave((y * F.silu(gate)).transpose(1, 2))


@member("tensor", because="A state space that keeps its number of channels, and reads it to lay out its tensors.")
class StateSpaceWithSizes(StateSpace):
    """Written with sizes, as Hugging Face writes it."""

    def __init__(self):
        super().__init__()
        self.inner = self.skip.numel()

    def forward(self, x):
        batch, length, _ = x.shape
        signal, gate = self.enter(x).transpose(1, 2).chunk(2, dim=1)
        signal = F.silu(self.conv(signal)[..., :length])
        low, b, c = self.select(signal.transpose(1, 2)).split([self.rank, self.state, self.state], dim=-1)
        step = F.softplus(self.step(low)).transpose(1, 2)
        h, out = x.new_zeros(batch, self.inner, self.state), []
        for at in range(length):
            decay = torch.exp(-self.log_decay.exp() * step[:, :, at, None])
            h = decay * h + step[:, :, at, None] * b[:, at, None] * signal[:, :, at, None]
            out.append((h @ c[:, at, :, None])[..., 0])
        y = torch.stack(out, -1).view(batch, self.inner, length) + self.skip[:, None] * signal
        return x + self.leave((y * F.silu(gate)).transpose(1, 2))


class Gain(nn.RMSNorm):
    def forward(self, x, gate, scale=None):
        x = super().forward(x * F.silu(gate))
        return x if scale is None else (x, scale)


@member("tensor", because="A norm over the hidden dimension that gets a gate, as in Mamba 2.")
class GatedNorm(TwoProducts):
    def __init__(self):
        super().__init__()
        self.gate, self.norm = nn.Linear(WIDTH, 48), Gain(48)

    def forward(self, x):
        return x + self.down(self.norm(self.up(x), gate=self.gate(x)))


@member("tensor", because="A norm that gets and gives a scale, as in I-BERT.")
class ScaledNorm(GatedNorm):
    def forward(self, x):
        h, scale = self.norm(self.up(x), self.gate(x), x.abs().mean())
        return x + self.down(h * scale)
