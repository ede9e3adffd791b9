"""Blocks of many kinds, each of a hand: on parts they compute what they compute whole, or they stay whole."""

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_3d.context.cut_attention import attention
from lightning_3d.context.cut_block import patch_block
from lightning_3d.module.undo import UndoStack
from lightning_3d.sandbox.interceptor import Interceptor
from lightning_3d.sandbox.silence import SDPA, SilenceRandom
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.late_tensor import compute_late
from lightning_3d.tensor.simulate import run_shards
from tests.context.test_plans import plan
from tests.context.trained import TOKENS, WIDTH, Training, next_token, token_batches

HEADS = 4


class Base(nn.Module):
    """A causal block, parts of which other kinds replace."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        return x + self.down(F.gelu(self.up(x)))

    def heads(self, x: Tensor) -> list[Tensor]:
        rows, length, _ = x.shape
        return [t.view(rows, length, HEADS, -1).transpose(1, 2) for t in self.qkv(x).split(WIDTH, dim=2)]

    def attend(self, x: Tensor) -> Tensor:
        return self.merged(F.scaled_dot_product_attention(*self.heads(x), is_causal=True))

    def merged(self, mixed: Tensor) -> Tensor:
        return self.out(mixed.transpose(1, 2).flatten(2))


class TokenShift(Base):
    """RWKV: half of the channels come from the token before."""

    def attend(self, x):
        before = F.pad(x, (0, 0, 1, -1))
        return super().attend(torch.cat([x[..., :8], before[..., 8:]], -1))


class RotaryInside(Base):
    """Positions of the length that it sees."""

    def attend(self, x):
        q, k, v = self.heads(x)
        angle = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.1])
        turn = lambda t: torch.cat([t[..., :2] * angle.cos() - t[..., 2:] * angle.sin(),  # noqa: E731
                                    t[..., 2:] * angle.cos() + t[..., :2] * angle.sin()], -1)  # fmt: skip
        return self.merged(F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True))


class LearnedInside(Base):
    def __init__(self):
        super().__init__()
        self.places = nn.Embedding(256, WIDTH)

    def attend(self, x):
        return super().attend(x + self.places(torch.arange(x.shape[1])))


class Alibi(Base):
    def attend(self, x):
        at = torch.arange(x.shape[1])
        far = (at[None] - at[:, None]).float()
        bias = far.masked_fill(far > 0, -torch.inf) * torch.tensor([0.5, 0.25, 0.1, 0.05]).view(-1, 1, 1)
        return self.merged(F.scaled_dot_product_attention(*self.heads(x), attn_mask=bias.nan_to_num(neginf=-torch.inf)))


SEGMENTS: dict[str, Tensor] = {}


class ByClosure(Base):
    """A mask of two documents that no argument has."""

    def attend(self, x):
        at = torch.arange(x.shape[1])
        SEGMENTS["now"] = (at[:, None] >= at[None]) & ((at[:, None] < 5) == (at[None] < 5))
        return self.merged(F.scaled_dot_product_attention(*self.heads(x), attn_mask=SEGMENTS["now"]))


class PrefixKeys(Base):
    """Learned keys and values before those of the sequence."""

    def __init__(self):
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(2, 1, HEADS, 3, WIDTH // HEADS))

    def attend(self, x):
        q, k, v = self.heads(x)
        k, v = (torch.cat([p.expand(x.shape[0], -1, -1, -1), t], 2) for p, t in zip(self.prefix, (k, v), strict=True))
        return self.merged(F.scaled_dot_product_attention(q, k, v))


class Registers(Base):
    """Tokens that are added inside, and taken away."""

    def __init__(self):
        super().__init__()
        self.registers = nn.Parameter(torch.randn(1, 3, WIDTH))

    def attend(self, x):
        return super().attend(torch.cat([self.registers.expand(x.shape[0], -1, -1), x], 1))[:, 3:]


class ClassToken(Base):
    def attend(self, x):
        return super().attend(x) + x[:, :1]


class Pairs(Base):
    def attend(self, x):
        even = x.shape[1] // 2 * 2
        mean = x[:, :even].unflatten(1, (-1, 2)).mean(2).repeat_interleave(2, 1)
        return super().attend(torch.cat([mean, x[:, even:]], 1))


class TimeFirst(Base):
    """[length, rows, width]."""

    def forward(self, x):
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class Grid(Base):
    def __init__(self):
        super().__init__()
        self.column = nn.Embedding(3, WIDTH)

    def attend(self, x):
        return super().attend(x + self.column(torch.arange(x.shape[1]) % 3))


class Window(Base):
    """A window of 4 positions by a mask made inside."""

    def attend(self, x):
        at = torch.arange(x.shape[1])
        near = (at[:, None] >= at[None]) & (at[:, None] - at[None] < 4)
        return self.merged(F.scaled_dot_product_attention(*self.heads(x), attn_mask=near))


class Twice(Base):
    def attend(self, x):
        return super().attend(x + super().attend(x))


class Tuple(Base):
    def forward(self, x):
        mixed = self.attend(x)
        return x + mixed, mixed


@dataclass
class Result:
    hidden: Tensor
    norm: Tensor


class Dataclass(Base):
    def forward(self, x):
        y = super().forward(x)
        return Result(y, y.norm(dim=-1))


class ScalarToo(Base):
    """A number of all positions beside the stream."""

    def forward(self, x):
        y = super().forward(x)
        return y, y.pow(2).mean()


class Experts(Base):
    def forward(self, x):
        x = x + self.attend(x)
        choice = (x[..., 0] > 0)[..., None]
        return x + torch.where(choice, self.down(F.gelu(self.up(x))), self.down(F.relu(self.up(x))))


class Capacity(Base):
    """Experts that take the 4 tokens that fit best."""

    def forward(self, x):
        x = x + self.attend(x)
        best = x[..., 0].topk(4, 1).indices[..., None].expand(-1, -1, WIDTH)
        return x.scatter_add(1, best, self.down(F.gelu(self.up(x.gather(1, best)))))


class ByList(Base):
    """A loss that is put into a list of another object, and is 0 for now."""

    losses: ClassVar[list] = []
    factor = 0.0

    def forward(self, x):
        y = super().forward(x)
        ByList.losses.append(self.factor * y.pow(2).mean())
        return y


class ReadBack(Base):
    """Branches by the values of all positions."""

    def attend(self, x):
        return super().attend(x) * (1.0 if x.abs().max().item() > 100 else 0.5)


class Padding(Base):
    """A mask that the step sets, which pads nothing at first."""

    padding: ClassVar = torch.ones(2, 26, 1)

    def attend(self, x):
        return super().attend(x * self.padding[:, : x.shape[1]])


class Channels(Base):
    def attend(self, x):
        return F.dropout1d(super().attend(x).transpose(1, 2), 0.2, self.training).transpose(1, 2)


class Statistics(Base):
    def attend(self, x):
        return super().attend((x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-3))


class LogLength(Base):
    def attend(self, x):
        q, k, v = self.heads(x)
        return self.merged(F.scaled_dot_product_attention(q * torch.tensor(float(x.shape[1])).log(), k, v))


class Latents(Base):
    """Queries of its own read all positions, and are read by them."""

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, HEADS, 5, WIDTH // HEADS))

    def attend(self, x):
        q, k, v = self.heads(x)
        read = F.scaled_dot_product_attention(self.latents.expand(x.shape[0], -1, -1, -1), k, v)
        return self.merged(F.scaled_dot_product_attention(q, read, read))


class KeptFunction(Base):
    def __init__(self) -> None:
        super().__init__()
        self.mix = F.scaled_dot_product_attention

    def attend(self, x: Tensor) -> Tensor:
        return self.merged(self.mix(*self.heads(x), is_causal=True))


CUT = {Base, TimeFirst, Twice, Tuple, Dataclass, Experts, KeptFunction}
"""Kinds that compute on parts. Of these, and of others if a later search finds a cut, results are compared."""
KINDS = [*Base.__subclasses__(), Base]


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module], first: bool) -> None:
        super().__init__()
        self.embed, self.head, self.first = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS), first
        self.blocks = nn.ModuleList([kind(), TimeFirst() if first else Base()])  # one that can be cut

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x.transpose(0, 1) if self.first else x
        for block in self.blocks:
            x = block(x)
            x = x.hidden if isinstance(x, Result) else x[0] if isinstance(x, tuple) else x
        return self.head(x.transpose(0, 1) if self.first else x)


def numbers(result):
    return (
        [*vars(result).values()]
        if isinstance(result, Result)
        else list(result)
        if isinstance(result, tuple)
        else [result]
    )


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_are_the_whole(kind, ranks):
    first = kind is TimeFirst
    built = []

    def build():
        module = Training(Stack(kind, first), next_token)
        built.append(module.model.blocks[0])
        return module, token_batches(26)

    cut = plan(build, ranks).blocks.get("model.blocks.0")
    assert (cut is not None) == (kind in CUT)
    if cut is None:
        return
    for length in (24, 25, 40):
        x = torch.randn((length, 2, WIDTH) if first else (2, length, WIDTH))
        alone, given = copy.deepcopy(built[0]), x.clone().requires_grad_()
        expected = numbers(alone(given))
        sum(each.square().sum() for each in expected).backward()

        def on_part(axis, x=x):
            twin, mine = copy.deepcopy(built[0]), x.clone().requires_grad_()
            with UndoStack() as undo:
                forward = patch_block(twin, cut, Axis(axis.group, weight=ranks), undo)
                found = compute_late(numbers(twin(mine)))
                assert forward.last is not None
                sum(each.square().sum() for each in found).backward()
            return [each.detach() for each in found], mine.grad, [p.grad for p in twin.parameters()]

        with UndoStack() as undo, Interceptor(SilenceRandom()):
            undo.replace(SDPA, attention, [built[0]])
            runs = run_shards(ranks, on_part)
        for found, grad, _ in runs:
            torch.testing.assert_close(found, [each.detach() for each in expected], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(grad, given.grad, rtol=1e-4, atol=1e-4)
        for at, parameter in enumerate(alone.parameters()):
            total = sum(grads[at] for *_, grads in runs if grads[at] is not None) / ranks
            if parameter.grad is not None:
                torch.testing.assert_close(total, parameter.grad, rtol=1e-4, atol=1e-4)
