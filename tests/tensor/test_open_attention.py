"""torch's own attention, opened for the tensor ranks, is compared with itself as its author wrote it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_3d.module.undo import UndoStack
from lightning_3d.tensor.attention import OpenAttention
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.patch import local_value, patch_unit
from lightning_3d.tensor.plan_module import plan_tensor
from lightning_3d.tensor.scratch import shard_copy
from lightning_3d.tensor.simulate import run_shards
from tests.parity import largest
from tests.tensor.parity import in_threads
from tests.zoo import blocks

CAUSAL = nn.Transformer.generate_square_subsequent_mask(16)


class Causal(nn.Module):
    """torch's own encoder with its own mask, which is float32 whatever the module is."""

    def __init__(self):
        super().__init__()
        self.inner = blocks.encoder()

    def forward(self, x):
        return self.inner(x, mask=CAUSAL)


def square(module, batch):
    return F.mse_loss(module(batch[0]), batch[1])


def test_a_causal_mask_of_another_precision():
    torch.manual_seed(0)
    module = Causal().double()
    batches = [(torch.randn(2, 16, 16).double(), torch.randn(2, 16, 16).double()) for _ in range(5)]
    plan, difference = in_threads(module, square, batches, 2)
    assert any("self_attn" in name for name in plan.splits)
    assert largest(difference.values()) < 1e-12, difference


def test_a_mask_that_is_declared_causal_is_dropped_as_torch_does():
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(16, 4, batch_first=True)
    x, zeros = torch.randn(2, 8, 16), torch.zeros(8, 8)
    for flags in ({"need_weights": False}, {"need_weights": True}):
        expected, _ = attention(x, x, x, attn_mask=zeros, is_causal=True, **flags)
        found, _ = OpenAttention(attention)(x, x, x, attn_mask=zeros, is_causal=True, **flags)
        assert torch.allclose(found, expected, atol=1e-6), flags


def test_an_opened_attention_that_computes_something_else_is_refused(monkeypatch):
    opened = OpenAttention.__call__

    def wrong(self, *args, **kwargs):
        output, weights = opened(self, *args, **kwargs)
        return output * 1.01, weights

    monkeypatch.setattr(OpenAttention, "__call__", wrong)
    module = blocks.encoder()
    with pytest.warns(UserWarning, match="self_attn.*none computes the same"):
        plan = plan_tensor(module, 2, calls=record_calls(module, lambda: module(torch.randn(2, 8, 16))))
    assert not any("self_attn" in name for name in plan.splits)


@pytest.mark.filterwarnings("ignore:TransformerEncoderLayer is called in a way")
def test_a_call_that_no_proof_covered_runs_torchs_own(monkeypatch):
    torch.manual_seed(0)
    module, x, padding = blocks.encoder().layers[0], torch.randn(2, 8, 16), torch.arange(8).expand(2, 8) > 5
    holder = nn.ModuleList([module])
    plan = plan_tensor(holder, 2, calls=record_calls(holder, lambda: module(x))).units["0"]
    assert any("self_attn" in name for name in plan.splits)
    monkeypatch.setattr(OpenAttention, "_project", lambda *_: pytest.fail("the opened one ran"))

    def job(axis):
        shard = shard_copy(module, lambda name, value: local_value(plan, name, value, axis.rank))
        patch_unit(shard, plan, axis, UndoStack())
        return shard(x, src_key_padding_mask=padding)

    for found in run_shards(2, job):
        torch.testing.assert_close(found, module(x, src_key_padding_mask=padding))
