"""A vocabulary is known from what looks it up and from its head, not from a number that others may have too."""

import re
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_3d.layout import Layout
from lightning_3d.strategy.banner import opening
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.plan_module import plan_tensor
from tests.parity import largest
from tests.tensor.parity import in_threads
from tests.zoo import blocks


class Untied(nn.Module):
    """A GPT with a head of its own, after a table of more positions than there are tokens."""

    def __init__(self, tokens, positions=8):
        super().__init__()
        self.gpt = blocks.GPT(tokens)
        self.positions = nn.Embedding(positions, 16)
        self.head = nn.Linear(16, tokens, bias=False)

    def forward(self, tokens):
        x = self.gpt.wte(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.gpt.h:
            x = block(x)
        return self.head(x)


def loss(module, tokens):
    return F.cross_entropy(module(tokens).flatten(0, 1), tokens.flatten())


def planned(module, tokens):
    batch = torch.randint(0, tokens, (2, 8))
    return plan_tensor(module, 2, calls=record_calls(module, lambda: loss(module, batch)))


@pytest.mark.parametrize("tokens", [48, 64, 51])
def test_matrices_of_blocks_may_be_as_wide_as_the_vocabulary(tokens):
    torch.manual_seed(0)
    plan, difference = in_threads(Untied(tokens), loss, [torch.randint(0, tokens, (2, 8)) for _ in range(3)], 2)
    assert largest(difference.values()) < 1e-5
    assert list(plan.units) == ["gpt.h.0", "gpt.h.1"]
    assert set(plan.vocabulary) == {"gpt.wte.weight", "gpt.lm_head.weight", "head.weight"}
    for block in plan.units.values():
        assert {"attn.c_attn.weight", "attn.c_proj.weight", "mlp.0.weight", "mlp.2.weight"} <= set(block.splits)


def test_a_table_of_positions_does_not_hide_a_smaller_vocabulary():
    assert {"gpt.wte.weight", "head.weight"} <= set(planned(Untied(48, positions=256), 48).vocabulary)


def test_the_opening_line_counts_what_stayed_whole_and_names_the_largest():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = blocks.MLP()
            self.extra = nn.Linear(16, 1000)

        def forward(self, x):
            return self.extra(self.inner(x))

    module = Wide()
    plan = plan_tensor(module, 2, tensor_plan={"extra": "whole"})
    (line,) = [s for s in opening(module, Layout(tensor_parallel_size=2), None, plan).splitlines() if "tensor:" in s]
    kept = 4 * sum(p.numel() for name, p in module.named_parameters() if name not in plan.splits)
    total = 4 * sum(p.numel() for p in module.parameters())
    assert kept > 0.8 * total
    assert f"({kept / total:.0%}) not split: " in line
    assert re.search(r"not split: \S+ KB extra\.weight, ", line)


def _twice(self, x):
    return 2 * type(self).forward(self, x)


def test_forwards_that_are_set_on_an_object_are_kept():
    """One scales the rows, and one the logits: the head is no plain one, and stays unsplit."""
    torch.manual_seed(0)
    module = Untied(64)
    for part in (module.gpt.wte, module.head):
        part.forward = MethodType(_twice, part)
    plan, difference = in_threads(module, loss, [torch.randint(64, (2, 8)) for _ in range(2)], 2)
    assert set(plan.vocabulary) == {"gpt.wte.weight", "gpt.lm_head.weight"}
    assert largest(difference.values()) < 1e-5
