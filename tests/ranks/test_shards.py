"""DTensors of shards that are not on the device of their mesh."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from lightning_3d.ranks.shards import like, local, on_mesh


def _mesh():
    """A mesh of another device than the CPU, without one: nothing is computed on it here."""
    return DeviceMesh("meta", [0], _init_backend=False, _rank=0)


def test_a_shard_in_host_memory_stays_there():
    shard = torch.arange(6.0).view(2, 3)
    made = on_mesh(shard, _mesh(), [Shard(0)], torch.Size([2, 3]), (3, 1))
    assert local(made).data_ptr() == shard.data_ptr()
    assert (made.shape, made.placements) == ((2, 3), (Shard(0),))


def test_a_state_of_another_dtype_is_like_its_parameter():
    parameter = on_mesh(torch.zeros(2, 3, dtype=torch.bfloat16), _mesh(), [Replicate()], torch.Size([2, 3]), (3, 1))
    state = like(parameter, torch.ones(2, 3))
    assert state.dtype == local(state).dtype == torch.float32
    assert local(state).device.type == "cpu"
