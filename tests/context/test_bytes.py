"""Bytes of the exchange, by the closed form of docs/long.md, in a dry run and in a real one."""

import pytest
import torch
from torch import nn

from lightning_3d.layout import CONTEXT_AXIS, PIPELINE_AXIS
from tests.context.trained import Retention
from tests.dryrun.compare import dry
from tests.dryrun.test_same import assert_same
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
    report = dry(f"tests.context.test_bytes:{kind}", f"1x{ranks}xcpu", strategy(ranks), ranks=range(ranks))
    assert report.errors == ()
    for rank in report.ranks:
        assert sum(row.bytes for row in rank.sent if row.axis == CONTEXT_AXIS) == 4 * closed_form(ranks, kind)


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
