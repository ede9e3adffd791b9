"""Bytes of the exchange, by the closed form of docs/long.md, in a dry run and in a real one."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_3d.layout import CONTEXT_AXIS, PIPELINE_AXIS
from tests.context.trained import Retention
from tests.dryrun.compare import dry
from tests.dryrun.test_same import assert_same
from tests.parity import change_differs, reference, train
from tests.workers import run
from tests.zoo.language import GPT, Block

ROWS, LENGTH, WIDTH, LAYERS, CLASSES = 12, 24, 16, 3, 29
"""Of the module Long, whose four heads two and four ranks divide."""


class Long(GPT):
    """On sequences that three and four ranks divide."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Embedding(LENGTH, WIDTH)

    def tensors(self):
        generator = torch.Generator().manual_seed(3)
        return (torch.randint(0, self.vocabulary, (self.samples, LENGTH + 1), generator=generator),)


class Mixer(Block):
    """It mixes positions within each head, by other means than attention."""

    def __init__(self):
        super().__init__(WIDTH, 4)
        self.c_attn, self.c_proj = None, Retention(4, 0.0)

    def attend(self, x):
        return self.c_proj(x)


class Mixed(Long):
    def __init__(self):
        super().__init__()
        self.blocks[0] = Mixer()


class Rotary(Block):
    """Its queries and keys are in fp32 under autocast, as those that rotary tables of Hugging Face have turned."""

    def attend(self, x):
        *turned, v = self.c_attn(x).unflatten(-1, (3, self.n_head, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*(each.float() for each in turned), v.to(x.dtype), is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Turned(Long):
    def __init__(self):
        super().__init__()
        for index in range(LAYERS):
            self.blocks[index] = Rotary(WIDTH, 4)


def strategy(ranks):
    return {"context_parallel_size": ranks, "zero_stage": 1}


def closed_form(ranks: int, kind: str) -> float:
    """Numbers that a rank sends in a step: in each block heads, or keys and values, or hidden states; a gradient; the
    sum of the loss."""
    part = ROWS * LENGTH / ranks * WIDTH
    inside = 8 * (ranks - 1) / ranks if 4 % ranks == 0 else 4 * (ranks - 1)
    mixers = int(kind == "Mixed")
    return (LAYERS - mixers) * inside * part + mixers * 4 * (ranks - 1) * part + (ranks - 1) * part + 2 * (ranks - 1)


@pytest.mark.parametrize(("kind", "ranks"), [("Long", 2), ("Long", 3), ("Long", 4), ("Mixed", 2), ("Mixed", 4)])
def test_a_dry_run_sends_the_closed_form(kind, ranks):
    """Both of two ranks, and the last of more."""
    simulated = range(ranks) if ranks == 2 else [ranks - 1]
    report = dry(f"tests.context.test_bytes:{kind}", f"1x{ranks}xcpu", strategy(ranks), ranks=simulated)
    assert report.errors == ()
    assert [rank.rank for rank in report.ranks] == [*simulated]
    for rank in report.ranks:
        assert sum(row.bytes for row in rank.sent if row.axis == CONTEXT_AXIS) == 4 * closed_form(ranks, kind)


def test_heads_are_sent_as_autocast_computes_with_them():
    report = dry("tests.context.test_bytes:Turned", "1x2xcpu", strategy(2), {"precision": "bf16-mixed"}, ranks=[1])
    assert report.errors == ()
    hidden, losses = 4 * ROWS * LENGTH / 2 * WIDTH, 4 * 2
    for rank in report.ranks:
        found = sum(row.bytes for row in rank.sent if row.axis == CONTEXT_AXIS)
        assert found == 2 * (closed_form(2, "Long") - ROWS * LENGTH / 2 * WIDTH - 2) + hidden + losses


def test_stages_send_the_part():
    """Activations one way and gradients the other, and the gradient of the tied weight."""
    pipeline = {"pipeline_parallel_size": 2, "num_microbatches": 2}
    report = dry("tests.context.test_bytes:Long", "1x4xcpu", {**strategy(2), **pipeline}, ranks=range(4))
    assert report.errors == ()
    for rank in report.ranks:
        sent = [row for row in rank.sent if row.axis == PIPELINE_AXIS and row.collective == "send"]
        assert sum(row.bytes for row in sent) == 4 * (ROWS * LENGTH / 2 + CLASSES) * WIDTH


@pytest.mark.long
@pytest.mark.parametrize(("kind", "ranks"), [("Long", 2), ("Long", 3), ("Long", 4), ("Mixed", 2)])
def test_a_real_run_is_as_the_dry_one(kind, ranks):
    """Blocks are compared in the first two steps, which computes more."""
    assert_same(f"tests.context.test_bytes:{kind}", ranks, strategy(ranks), {"max_steps": 3}, setup=False)


@pytest.mark.parametrize("ranks", [2, 4])
def test_slices_of_weights_in_half_precision_have_the_numbers_of_autocast(ranks):
    trainer, layout = {"precision": "bf16-mixed", "max_epochs": 2}, {"context_parallel_size": ranks, "quiet": True}
    attributes = {"optimizer": "plain_sgd"}
    wanted = reference(f"{__name__}:Mixed", attributes, trainer)
    for got in run(train, f"{__name__}:Mixed", ranks, layout, attributes, trainer, world=ranks):
        torch.testing.assert_close(got["losses"], wanted["losses"], rtol=2e-3, atol=2e-3)
        assert change_differs(got, wanted) < 0.02
