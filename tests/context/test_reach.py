"""What a short proof would not show: code that reaches far, draws that positions share, kernels of another library."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_3d.context import cut_attention
from lightning_3d.context.cut_attention import _own_heads
from lightning_3d.context.cut_block import patch_block
from lightning_3d.context.cut_plan import parts_of
from lightning_3d.errors import UnsupportedError
from lightning_3d.module.undo import UndoStack
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.geometry import assemble, local_part
from lightning_3d.tensor.simulate import run_shards
from tests.context.test_plans import plan
from tests.context.trained import TOKENS, WIDTH, Training, next_token, token_batches

LENGTH = 64


class Far(nn.Module):
    """A block of `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.qkv, self.out = kind, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout1d(0.5) if kind == "channels" else nn.Dropout(0.5)
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, dilation=16, padding=32, groups=WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        h = x + self.mix(x.transpose(1, 2))[..., :length].transpose(1, 2) if self.kind == "dilated" else x
        q, k, v = (t.view(rows, length, 4, -1).transpose(1, 2) for t in self.qkv(h).split(WIDTH, dim=2))
        at = torch.arange(length)
        near = (at[None] <= at[:, None]) & (at[:, None] - at[None] < 32)
        if self.kind == "window" and length > 32:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=near)
        elif self.kind == "last keys":
            mixed = F.scaled_dot_product_attention(q, k[:, :, -32:], v[:, :, -32:])
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        if self.kind == "channels":
            mixed = self.drop(mixed.transpose(1, 2)).transpose(1, 2)
        elif self.kind == "shared":
            mixed = mixed * self.drop(torch.ones(rows, 1, WIDTH))
        elif self.kind == "dropout":
            mixed = self.drop(mixed)
        return x + mixed


class Stack(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.blocks = nn.ModuleList(Far(kind) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _plan(kind):
    return plan(lambda: (Training(Stack(kind), next_token), token_batches(LENGTH)))


@pytest.mark.parametrize("kind", ["dilated", "window", "last keys"])
def test_what_reaches_further_than_the_short_proof_is_seen(kind):
    with pytest.raises(UnsupportedError, match="as far as they reach"):
        _plan(kind)


def test_whole_channels_are_not_dropped_in_parts():
    with pytest.raises(UnsupportedError, match="zeroes whole channels"):
        _plan("channels")


@pytest.mark.parametrize(("kind", "on_part"), [("shared", (False,)), ("dropout", (True,))])
def test_masks_that_positions_share_are_drawn_alike(kind, on_part):
    for cut in _plan(kind).blocks.values():
        assert cut.on_part == on_part


def test_each_rank_takes_the_mask_of_its_heads():
    mask = torch.arange(4.0).view(1, 4, 1, 1)
    assert torch.cat(run_shards(2, lambda axis: _own_heads(mask, axis)), 1).equal(mask)


def test_a_reentrant_checkpoint_with_dropout_is_refused():
    cut = next(iter(_plan("dropout").blocks.values()))

    def run(axis):
        block = Far("dropout").train()
        with UndoStack() as undo:
            patch_block(block, cut, Axis(axis.group, weight=axis.size), undo)
            checkpoint(block, torch.randn(2, LENGTH, WIDTH, requires_grad=True), use_reentrant=True)

    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        run_shards(2, run)


def test_ranks_have_equal_work_where_they_gather_keys(monkeypatch):
    """Of a causal mask the last of four contiguous parts would have 1.75 times the mean."""
    q, k, v = torch.randn(3, 1, 1, LENGTH + 1, 4).unbind()
    split, met = parts_of(2, LENGTH + 1, 4), dict.fromkeys(range(4), 0)

    def counted(query, key, *args):
        met[cut_attention._here.part.axis.rank] += query.shape[-2] * key.shape[-2]
        return F.scaled_dot_product_attention(query, key, *args)

    def job(axis):
        with cut_attention.running(cut_attention.Part(Axis(axis.group, weight=4), split)):
            parts = (local_part(each, split, axis.rank) for each in (q, k, v))
            return cut_attention.attention(*parts, is_causal=True)

    monkeypatch.setattr(cut_attention, "SDPA", counted)
    mixed = assemble(run_shards(4, job), split)
    torch.testing.assert_close(mixed, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert max(met.values()) < 1.1 * sum(met.values()) / 4
