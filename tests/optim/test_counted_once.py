"""The norm of gradients counts each shard on one rank, whatever the axes divide."""

from collections import Counter

import pytest
import torch

from lightning_3d.layout import CONTEXT_AXIS, DATA_AXIS, EXPERT_AXIS, TENSOR_AXIS, Layout
from lightning_3d.optim import grad_norm
from lightning_3d.ranks.mesh import EXPERT_REPLICAS, SHARD_AXIS, SHARD_WITH_CONTEXT, WITH_CONTEXT

LAYOUT = Layout(data_parallel_size=4, tensor_parallel_size=2, context_parallel_size=2)
OWNERS = 2


def place(at):
    return at.data * LAYOUT.context_parallel_size + at[CONTEXT_AXIS]


SHARDS = {
    (): lambda at: (),
    (TENSOR_AXIS,): lambda at: at[TENSOR_AXIS],
    (DATA_AXIS,): lambda at: at.data,
    (SHARD_AXIS,): lambda at: at.data % 2,
    (WITH_CONTEXT,): lambda at: (at.data, at[CONTEXT_AXIS]),
    (SHARD_WITH_CONTEXT, TENSOR_AXIS): lambda at: (at.data % 2, at[CONTEXT_AXIS], at[TENSOR_AXIS]),
    (EXPERT_AXIS,): lambda at: place(at) % OWNERS,
    (EXPERT_AXIS, EXPERT_REPLICAS): place,
}
"""The axes of the mesh that shard a parameter -> which shard a rank has."""


@pytest.mark.parametrize("axes", SHARDS, ids="-".join)
def test_each_shard_is_counted_once(axes, monkeypatch):
    monkeypatch.setattr(grad_norm, "sharded_axes", lambda parameter: dict.fromkeys(axes))
    copies = 2 if {SHARD_AXIS, SHARD_WITH_CONTEXT}.intersection(axes) else 4
    ranks = [LAYOUT.coordinate(rank) for rank in range(LAYOUT.world_size)]
    counted = Counter(
        SHARDS[axes](at) for at in ranks if grad_norm.counted_here(torch.empty(0), at, copies, place(at) // OWNERS)
    )
    assert counted == dict.fromkeys(map(SHARDS[axes], ranks), 1)
