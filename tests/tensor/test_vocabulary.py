"""Ids and targets that no rank has raise on every rank, as they do on one device."""

import copy

import pytest
import torch
from torch import nn

from lightning_3d.module.undo import UndoStack
from lightning_3d.tensor.cross_entropy import parallel_cross_entropy
from lightning_3d.tensor.geometry import TensorSplit, local_part
from lightning_3d.tensor.simulate import run_shards
from lightning_3d.tensor.vocabulary import patch_vocabulary

SPLIT = TensorSplit.even(0, 10, 2)


def raised(job):
    def tried(axis):
        try:
            return job(axis)
        except (IndexError, RuntimeError) as error:
            return error

    return run_shards(2, tried)


def sharded(whole, axis):
    shard = copy.deepcopy(whole)
    shard.weight = nn.Parameter(local_part(whole.weight.detach(), SPLIT, axis.rank))
    patch_vocabulary(shard, {"weight": SPLIT}, axis, UndoStack())
    return shard


@pytest.mark.parametrize("row", [2, 7])
def test_a_row_of_padding_has_no_gradient(row):
    whole = nn.Embedding(10, 4, padding_idx=row)

    def gradient(axis):
        shard = sharded(whole, axis)
        shard(torch.arange(10)).sum().backward()
        return shard.weight.grad

    whole(torch.arange(10)).sum().backward()
    assert torch.cat(run_shards(2, gradient)).equal(whole.weight.grad)


@pytest.mark.parametrize("bad", [-1, 10, 1000])
def test_an_id_out_of_range(bad):
    whole = nn.Embedding(10, 4)

    def look_up(axis):
        shard = sharded(whole, axis)
        assert torch.equal(shard(torch.tensor([0, 4, 5, 9])), whole(torch.tensor([0, 4, 5, 9])))
        return shard(torch.tensor([0, bad]))

    for error in raised(look_up):
        assert isinstance(error, IndexError)


@pytest.mark.parametrize("bad", [-1, 10])
def test_a_target_out_of_range(bad):
    logits = torch.randn(2, 10)

    def loss(axis):
        own = local_part(logits, TensorSplit(1, SPLIT.pieces), axis.rank)
        return parallel_cross_entropy(own, torch.tensor([0, bad]), SPLIT, axis)

    for error in raised(loss):
        assert "out of bounds" in str(error)
