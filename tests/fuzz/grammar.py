"""Modules out of a small grammar: `Spec` describes one, `Drawn(spec)` is the LightningModule, plain torch throughout.

A block is a tuple: its kind, then what it is made of. Every block keeps the shape of what it is given.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.zoo.base import Base

ACTIVATIONS = {"tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU, "relu": nn.ReLU}


@dataclass(frozen=True)
class Spec:
    source: str = "vector"
    """What a sample is: "vector", "sequence" (of vectors) or "tokens"."""
    width: int = 8
    blocks: tuple = (("linear", True),)
    container: str = "list"
    """How the blocks are held: "list", "sequential", or as "attributes"."""
    heads: tuple = (("mse", 1, -1),)
    """Loss, outputs, and the block behind which the head reads, -1 for the last."""
    tie: str = "none"
    """"table": the first head's weight is the embedding's; "weight": two blocks share one; "module": a block twice."""
    skip: bool = False
    """What enters the first block is added to what leaves the last."""
    frozen: bool = False
    """The first block is not trained."""
    recompute: bool = False
    """The module itself checkpoints the activations of its blocks."""
    vocabulary: int = 11


class Residual(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Sequential(*(block(kind, width) for kind in inner))

    def forward(self, x):
        return x + self.inner(self.norm(x))


class Gated(nn.Module):
    def __init__(self, width, hidden, bias):
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias), nn.Linear(width, hidden, bias)
        self.down = nn.Linear(hidden, width, bias)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Scale(nn.Module):
    """A parameter without dimensions, or one for each feature."""

    def __init__(self, width, each):
        super().__init__()
        self.factor = nn.Parameter(torch.full((width,) if each else (), 1.1))

    def forward(self, x):
        return x * self.factor


class Attention(nn.Module):
    """Sizes are written out or left to `view`, the projection is fused, dealt by heads, in groups, or separate."""

    def __init__(self, width, heads, style):
        super().__init__()
        self.heads, self.size, self.style = heads, width // heads, style
        self.groups = max(1, heads // 2) if style == "grouped" else heads
        if style in ("fused", "dealt"):
            self.qkv = nn.Linear(width, 3 * width)
        else:
            self.query = nn.Linear(width, width)
            self.key, self.value = (nn.Linear(width, self.groups * self.size, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width)

    def project(self, x):
        b, t, width = x.shape
        if self.style == "fused":
            return (y.view(b, t, self.heads, self.size).transpose(1, 2) for y in self.qkv(x).split(width, dim=2))
        if self.style == "dealt":
            return self.qkv(x).view(b, t, self.heads, 3, self.size).permute(3, 0, 2, 1, 4)
        q, k, v = (layer(x).view(b, t, -1, self.size).transpose(1, 2) for layer in (self.query, self.key, self.value))
        if self.style == "grouped":
            k, v = (y.repeat_interleave(self.heads // self.groups, dim=1) for y in (k, v))
        return q, k, v

    def forward(self, x):
        q, k, v = self.project(x)
        if self.style == "written":
            y = (q @ k.transpose(-2, -1) / self.size**0.5).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))


class Torch(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


def _mlp(width, hidden, act, bias):
    return nn.Sequential(nn.Linear(width, hidden, bias), ACTIVATIONS[act](), nn.Linear(hidden, width, bias))


KINDS = {
    "linear": lambda width, bias: nn.Linear(width, width, bias),
    "mlp": _mlp,
    "gated": Gated,
    "layer_norm": lambda width: nn.LayerNorm(width),
    "rms_norm": lambda width: nn.RMSNorm(width),
    "act": lambda width, act: ACTIVATIONS[act](),
    "scale": Scale,
    "residual": lambda width, *inner: Residual(width, inner),
    "attention": Attention,
    "torch_attention": Torch,
}


def block(described, width):
    kind, *parts = described
    return KINDS[kind](width, *parts)


class Drawn(Base):
    def __init__(self, spec):
        super().__init__()
        self.spec = spec
        width = spec.width
        if spec.source == "tokens":
            self.enter = nn.Embedding(spec.vocabulary, width)
            self.positions = nn.Parameter(torch.randn(5, width) * 0.1)
        else:
            self.enter = nn.Linear(5, width)
        blocks = [block(described, width) for described in spec.blocks]
        if spec.tie == "module":
            blocks[-1] = blocks[0]
        if spec.tie == "weight":
            first, second = (next(m for m in b.modules() if isinstance(m, nn.Linear)) for b in (blocks[0], blocks[-1]))
            second.weight = first.weight
        if spec.container == "attributes":
            for index, each in enumerate(blocks):
                setattr(self, f"block_{index}", each)
        else:
            self.blocks = nn.Sequential(*blocks) if spec.container == "sequential" else nn.ModuleList(blocks)
        if spec.frozen:
            blocks[0].requires_grad_(False)
        self.heads = nn.ModuleList(
            [nn.Linear(width, size, bias=index > 0) for index, (_, size, _) in enumerate(spec.heads)]
        )
        if spec.tie == "table":
            self.heads[0].weight = self.enter.weight

    def body(self, x):
        left = []
        for index in range(len(self.spec.blocks)):
            each = getattr(self, f"block_{index}") if self.spec.container == "attributes" else self.blocks[index]
            x = checkpoint(each, x, use_reentrant=False) if self.spec.recompute else each(x)
            left.append(x)
        return left

    def loss(self, batch):
        x, targets = batch[0], batch[1:]
        entered = self.enter(x)
        if self.spec.source == "tokens":
            entered = entered + self.positions
        whole = self.spec.container == "sequential" and all(at == -1 for _, _, at in self.spec.heads)
        left = [self.blocks(entered)] if whole and not self.spec.recompute else self.body(entered)
        if self.spec.skip:
            left[-1] = left[-1] + entered
        total = 0.0
        for weight, (kind, _, at), head, target in zip(
            (1.0, 0.5, 0.3), self.spec.heads, self.heads, targets, strict=False
        ):
            scores = head(left[at])
            if kind == "ce":
                total = total + weight * F.cross_entropy(scores.flatten(0, -2), target.flatten())
            else:
                total = total + weight * F.mse_loss(scores, target)
        return total

    def tensors(self):
        generator = torch.Generator().manual_seed(11)
        rows = (self.samples,) if self.spec.source == "vector" else (self.samples, 5)
        if self.spec.source == "tokens":
            x = torch.randint(0, self.spec.vocabulary, rows, generator=generator)
        else:
            x = torch.randn(*rows, 5, generator=generator)
        targets = []
        for kind, size, _ in self.spec.heads:
            if kind == "ce":
                targets.append(torch.randint(0, size, rows, generator=generator))
            else:
                targets.append(torch.randn(*rows, size, generator=generator))
        return x, *targets

    def configure_optimizers(self):
        made = OPTIMIZERS[self.optimizer](self)
        if self.schedule is None:
            return made
        schedule = {"scheduler": optim.lr_scheduler.ExponentialLR(made, 0.7), "interval": self.schedule}
        return {"optimizer": made, "lr_scheduler": schedule}

    schedule = None
    """How often the learning rate falls: "step", "epoch" or never."""


def _groups(module):
    """Matrices and the rest apart, as many do for weight decay."""
    trained = [p for p in module.parameters() if p.requires_grad]
    matrices, rest = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 3e-3}]
    return optim.AdamW([group for group in groups if group["params"]], lr=1e-3, eps=1e-4)


def _adamw(module, **how):
    return optim.AdamW(module.parameters(), lr=1e-3, eps=1e-4, **how)


OPTIMIZERS = {
    "plain_sgd": lambda module: optim.SGD(module.parameters(), lr=0.05),
    "sgd": lambda module: optim.SGD(module.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": _adamw,
    "adamw_fused": partial(_adamw, fused=True),
    "adamw_foreach": partial(_adamw, foreach=True),
    "adamw_single": partial(_adamw, foreach=False),
    "groups": _groups,
}
