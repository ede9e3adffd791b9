"""Mixtures in styles of their authors: other orders of arguments, dispatch by products, corrections between steps."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_3d.errors import UnsupportedError
from lightning_3d.experts.prove_experts import plan_experts
from tests.experts.test_data_ranks import TWO
from tests.experts.trained import Listed
from tests.parity import assert_parity, fit
from tests.workers import WorkerError, run

WIDTH, COUNT = 8, 4


def expert():
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH), nn.Dropout(0.0))


class Styled(Listed):
    """Two mixtures with residuals, and what they keep for the loss."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(2))

    def loss(self, batch):
        x = self.embed(batch[0])
        for block in self.blocks:
            x = x + block(x.flatten(0, 1)).view_as(x)
        kept = sum(getattr(block, "kept", 0.0) for block in self.blocks)
        return (self.head(x) - batch[0][..., :3]).square().mean() + 0.1 * kept


class Products(nn.Module):
    """One-hot masks send tokens, those of an expert that no token has are zeros, and a loss of the router is kept."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, COUNT), nn.ModuleList(expert() for _ in range(COUNT))

    def forward(self, tokens):
        scores = self.router(tokens)
        self.kept = scores.logsumexp(-1).square().mean()
        weight, chosen = scores.softmax(-1).max(-1)
        mask = F.one_hot(chosen, COUNT).to(tokens.dtype)
        place = F.one_hot(((mask.cumsum(0) - 1) * mask).sum(-1).long(), len(tokens)).to(tokens.dtype)
        sent = torch.einsum("te,tc,tw->ecw", mask, place, tokens)
        results = torch.stack([each(rows) for each, rows in zip(self.experts, sent, strict=True)])
        return torch.einsum("te,tc,t,ecw->tw", mask, place, weight, results)


class ByProducts(Styled):
    block = Products


class Corrected(nn.Module):
    """Sigmoid scores, chosen with a correction, masked writes into the result, experts in a dict."""

    def __init__(self):
        super().__init__()
        self.gate, self.shared = nn.Linear(WIDTH, COUNT, bias=False), expert()
        self.experts = nn.ModuleDict({f"expert{number}": expert() for number in range(COUNT)})
        self.register_buffer("correction", torch.zeros(COUNT))
        self.register_buffer("load", torch.zeros(COUNT), persistent=False)

    def forward(self, tokens):
        scores = self.gate(tokens).sigmoid()
        chosen = (scores + self.correction).topk(2, -1).indices
        self.load += F.one_hot(chosen, COUNT).sum((0, 1))
        result = self.shared(tokens)
        for number, each in enumerate(self.experts.values()):
            mask = (chosen == number).any(-1)
            if mask.any():
                part = torch.zeros_like(tokens)
                part[mask] = each(tokens[mask])
                result = result + part * scores[:, number, None]
        return result


class CorrectedBetweenSteps(Styled):
    block = Corrected

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        for block in self.blocks:
            if not block.load.is_meta:  # of this stage
                load = self.trainer.strategy.reduce(block.load.clone(), reduce_op="sum")
                block.correction.add_(0.05 * (load.mean() - load).sign())
                block.load.zero_()


class Experts(nn.Module):
    """Weights stand ahead of numbers."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(COUNT, 12, WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(COUNT, WIDTH, 12) * 0.3)

    def forward(self, tokens, expert_weights, expert_indices):
        result = torch.zeros_like(tokens)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            row, place = torch.where(expert_indices == number)
            inner = F.silu(tokens[row] @ up.T) @ down.T
            result = result.index_add(0, row, inner * expert_weights[row, place, None])
        return result


class Called(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, COUNT), Experts()

    def forward(self, tokens):
        with torch.autocast(tokens.device.type, enabled=False):
            weights, chosen = self.gate(tokens.float()).softmax(-1).topk(2, -1)
        self.kept = weights.square().mean()
        return self.experts(tokens, weights.to(tokens.dtype), chosen)


class WeightsFirst(Styled):
    block = Called


STAGES = {"pipeline_parallel_size": 2, "num_microbatches": 2}


@pytest.mark.parametrize(
    ("kind", "world", "strategy"),
    [
        ("ByProducts", 2, {**TWO, "zero_stage": 1}),
        ("CorrectedBetweenSteps", 4, {**TWO, "zero_stage": 3}),
        ("CorrectedBetweenSteps", 2, {"tensor_parallel_size": 2}),
        ("CorrectedBetweenSteps", 2, {"zero_stage": 3}),
        ("WeightsFirst", 4, {"expert_parallel_size": 4, "zero_stage": 2}),
        ("WeightsFirst", 2, {"tensor_parallel_size": 2, "tensor_plan": {"*.experts": "experts"}}),
        ("CorrectedBetweenSteps", 2, STAGES),
        ("CorrectedBetweenSteps", 8, {**TWO, "tensor_parallel_size": 2, **STAGES}),
    ],
    ids=["products", "experts", "tensor", "zero3", "weights", "weights-tensor", "stages", "three-axes"],
)
def test_a_style_trains_as_on_one_device(kind, world, strategy):
    trainer = {"gradient_clip_val": 0.5, "max_epochs": 1}
    name = f"tests.experts.test_styles:{kind}"
    assert_parity(name, world, {"quiet": True, **strategy}, trainer=trainer, steps=10, timeout=240)


class Overwritten(Corrected):
    def forward(self, tokens):
        self.load.zero_()
        return super().forward(tokens)


class OverwrittenBetweenSteps(Styled):
    block = Overwritten


def test_a_buffer_of_the_last_microbatch_is_named():
    with pytest.raises(WorkerError, match=r"each writes 'blocks.0.load', 'blocks.1.load'. Code between steps reads"):
        run(fit_with_errors, world=2)


def fit_with_errors():
    warnings.filterwarnings("error", message="A pipeline cuts")
    fit(
        lambda: (OverwrittenBetweenSteps(), [(part,) for part in OverwrittenBetweenSteps().tensors()[0].split(8)]),
        STAGES,
    )


class Outer(Products):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Products() for _ in range(COUNT))


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (lambda: nn.Sequential(Outer()), "inside of 0.experts.0, an expert of another mixture"),
        (Products, "Products itself calls them"),
    ],
    ids=["nested", "root"],
)
def test_what_ranks_would_call_unequally_is_refused(module, says):
    with pytest.raises(UnsupportedError, match=says):
        plan_experts(module(), 2)  # a module made while this file is imported would take draws
