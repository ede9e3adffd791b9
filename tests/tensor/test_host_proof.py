"""Blocks with flash attention, which no CPU has, are planned as those with torch's own."""

import pytest
import torch
import torch.nn.functional as F

from lightning_3d.sandbox.interceptor import Interceptor
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.plan_module import plan_tensor
from lightning_3d.tensor.scratch import RefuseNoHeads
from tests.parity import silent
from tests.zoo import blocks

transformers = pytest.importorskip("transformers")


def _plan(module, implementation):
    """Recorded with torch's attention, in place of a GPU."""
    tokens = torch.randint(0, 50, (2, 8))
    calls = record_calls(module, lambda: module(input_ids=tokens, labels=tokens))
    module.config._attn_implementation = implementation
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    before = dict(functions)
    with silent():
        plan = plan_tensor(module, 2, calls=calls)
    assert dict(functions) == before
    return plan


def test_flash_attention_is_divided_by_heads():
    torch.manual_seed(0)
    wanted, plan = (_plan(blocks.llama(), name) for name in ("sdpa", "flash_attention_2"))
    assert len(plan.units) == 2
    assert plan.splits == wanted.splits
    assert plan.unsplit == wanted.unsplit


class Sinks(torch.nn.Module):
    """Gives each attention a number for each head."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention
        self.sinks = torch.nn.Parameter(torch.zeros(4))

    def forward(self, *args, **kwargs):
        return self.attention(*args, s_aux=self.sinks, **kwargs)


def test_what_the_cpu_cannot_prove_stays_unsplit():
    module = blocks.llama()
    for layer in module.model.layers:
        layer.self_attn = Sinks(layer.self_attn)
    plan = _plan(module, "flash_attention_2")
    assert not plan.units
    assert all("flash attention takes 's_aux'" in why for why in plan.unsplit.values())


def test_attention_without_heads_is_an_error_of_the_candidate():
    """The CPU kernel of torch 2.11 divides by their number, which ended the process of Phi-3 with tensor ranks."""
    empty, one = torch.zeros(2, 0, 8, 16), torch.zeros(2, 1, 8, 16)
    with Interceptor(RefuseNoHeads()):
        with pytest.raises(ValueError, match="without heads"):
            F.scaled_dot_product_attention(empty, key=empty, value=empty)
        assert F.scaled_dot_product_attention(one, one, one, is_causal=True).shape == one.shape
