"""Ranks whose process groups have a backend for the device only, as NCCL alone has: they refuse every CPU tensor.

Shards in host memory stay there.
"""

from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_3d import Strategy3D
from lightning_3d.axes.group import Group
from lightning_3d.axes.ledger import Ledger
from lightning_3d.axes.ring_wire import RingWire
from lightning_3d.comm.background_queue import BackgroundQueue
from lightning_3d.comm.grad_sync import Hierarchical
from lightning_3d.comm.replicate import ReplicatedGradients
from lightning_3d.errors import DivergenceError
from lightning_3d.layout import Layout
from lightning_3d.optim.step import move_states
from lightning_3d.pipeline.exchange import StageExchange
from lightning_3d.precision import Precision3D
from lightning_3d.ranks import talk
from lightning_3d.ranks.groups import open_groups
from lightning_3d.ranks.process_groups_private import timeout_of
from lightning_3d.ranks.shards import like, local, on_mesh, unsharded
from tests.workers import on_ranks


def _device_only() -> None:
    """Replace the worker's process group by one that has gloo for CUDA tensors, and nothing for those of the CPU."""
    rank, world, store = dist.get_rank(), dist.get_world_size(), dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()
    store = dist.PrefixStore("device_only", store)
    dist.init_process_group("cuda:gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1))


@on_ranks(2)
def test_objects_and_numbers_travel_between_hosts():
    _device_only()
    world = dist.group.WORLD
    hosts = talk.open_hosts(world)
    assert hosts is not world
    assert talk.open_hosts(world) is hosts
    assert talk.PendingMax([dist.get_rank(), 7], hosts).wait() == [1, 7]
    assert talk.gather(dist.get_rank()) == [0, 1]
    assert talk.from_first(lambda: dist.get_rank(), first=1) == 1
    assert timeout_of(world) == timeout_of(hosts) == timedelta(seconds=30)


class OnHosts(Group):
    """Stands in for NCCL: sends the gradients of this CPU by a group that nothing else uses."""

    def __init__(self, group):
        ranks = dist.new_group(dist.get_process_group_ranks(group), backend="gloo")
        super().__init__(ranks, "data", Ledger(), RingWire(ranks))


@on_ranks(2)
def test_replicated_gradients_agree_without_a_cpu_backend_and_wait_only_where_they_must():
    _device_only()
    axes = open_groups(Layout(data_parallel_size=2), dist.get_rank(), "meta", timedelta(seconds=30))
    layer, engine = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), BackgroundQueue()
    for parameter in layer.parameters():
        nn.init.ones_(parameter)
    replicas = ReplicatedGradients(list(layer.parameters()), OnHosts(axes.data), engine, axes.hosts)
    for step in range(4):
        layer.zero_grad()
        used = layer[0] if step == 2 and dist.get_rank() == 0 else layer  # one rank does not reach the second
        used(torch.ones(1, 4)).sum().backward()
        replicas.finish()
        assert [parameter.grad is None for parameter in layer.parameters()] == [False] * 4
        assert float(layer[1].bias.grad[0]) == (0.5 if step == 2 else 1.0)
        assert (replicas._last_answer is None) == (step == 0 or (step == 2 and dist.get_rank() == 0))
    layer[1].requires_grad_(dist.get_rank() == 0)
    with pytest.raises(DivergenceError, match="Freeze and unfreeze the same"):
        replicas.finish()
    engine.close()


@on_ranks(2)
def test_hierarchical_sync_starts():
    _device_only()
    collectives = Hierarchical(dist.group.WORLD, Ledger(), "data", 2)
    assert timeout_of(collectives.inside.ranks) == timedelta(seconds=30)


@on_ranks(2)
def test_a_group_of_two_backends_is_used_as_it_is():
    """ "cpu:gloo,cuda:nccl" is no name of one backend: the device decides, and CPU tensors need no second group."""
    _device_only()
    store = dist.PrefixStore("mixed", dist.distributed_c10d._get_default_store())
    rank = dist.get_rank()
    dist.destroy_process_group()
    dist.init_process_group("cpu:gloo,cuda:gloo", store=store, rank=rank, world_size=2)
    assert talk.open_hosts(dist.group.WORLD) is dist.group.WORLD
    stages = StageExchange(SimpleNamespace(ties=()), dist.group.WORLD, (0, 1), torch.device("meta"))
    assert stages.device == torch.device("meta")


@on_ranks(2)
def test_an_offloaded_shard_is_gathered_on_the_device_of_its_mesh():
    mesh = init_device_mesh("meta", (2,))
    tensor = DTensor.from_local(torch.ones(2, device="meta"), mesh, [Shard(0)], run_check=False)
    tensor._local_tensor = torch.ones(2)  # as FSDP2 offloads it: host memory on a mesh of devices
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):  # gathered there, then sent home
        unsharded(tensor)


def test_no_precision_asks_for_cuda_before_processes_start(monkeypatch):
    def refused():
        raise AssertionError("asked for CUDA in the parent")

    monkeypatch.setattr(torch.cuda, "is_available", refused)
    for precision in ("32-true", "bf16-mixed", "16-mixed"):
        strategy = Strategy3D(precision_plugin=Precision3D(precision))
        strategy.precision_plugin.compute_on(torch.device("cpu"))
        assert strategy.precision_plugin.half_dtype() in (None, torch.bfloat16, torch.float16)


def test_states_of_offloaded_parameters_stay_with_them():
    here, there = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))
    optimizer = torch.optim.Adagrad([here])
    optimizer.state[there] = {"sum": torch.ones(2)}
    move_states([optimizer], torch.device("meta"))
    assert optimizer.state[here]["sum"].device.type == "cpu"
    assert optimizer.state[here]["step"].device.type == "cpu"
    assert optimizer.state[there]["sum"].is_meta


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
