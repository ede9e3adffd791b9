"""FSDP2 with our collectives under it gives what one process gives."""

import copy
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_3d.axes.group import Group
from lightning_3d.axes.ledger import Ledger
from lightning_3d.comm.background_queue import BackgroundQueue
from lightning_3d.comm.grad_sync import CommConfig, build_collectives, build_compression
from lightning_3d.zero.fsdp_private import groups_at, sharded_parameters
from lightning_3d.zero.fsdp_seam import CopyNotes, FullySharded, UnallocatedBuffer
from tests.axes.rings import ring
from tests.comm.slow import SlowEngine
from tests.workers import on_ranks


class Net(nn.Module):
    """Uneven sizes, a scalar-like row, a bias-free layer, two calls of one block."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(13, 9), nn.Tanh(), nn.Linear(9, 13)) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(1))
        self.last = nn.Linear(13, 1, bias=False)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.blocks[0](x) * self.scale).squeeze(-1)


def _shard(model, *, reshard, **options):
    options["reshard_after_forward"] = reshard
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


def _train(model, twin, *, accumulate=1):
    """Train the sharded model on this rank's part and the twin on all of it; the largest difference in the end."""
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, twin)]
    for _ in range(4):
        for _ in range(accumulate):
            data = torch.randn(size, 3, 7)
            model(data[rank]).pow(2).mean().backward()
            twin(data.view(-1, 7)).pow(2).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():  # evaluation between steps must leave nothing behind
            torch.testing.assert_close(model.eval()(data[rank]), twin(data[rank]))
            model.train()
    for module in (*model.blocks, model):
        module.reshard()
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return max((a.full_tensor() - b).abs().max().item() for a, b in pairs)


@on_ranks(4)
def test_hybrid_shard():
    model = Net()
    twin = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _shard(model, reshard=True, mesh=mesh["shard"])
    engine, ledger = SlowEngine(), Ledger()

    def over(name):
        ranks = dist.get_process_group_ranks(mesh[name].get_group())
        return ring(dist.new_group(ranks, use_local_synchronization=True), ledger, name)

    FullySharded(model, over("shard"), engine, replicate=over("replicate"))
    difference = _train(model, twin, accumulate=2)
    engine.close()
    assert ledger.bytes("replicate", "all_reduce") > 0
    assert difference < 1e-5


class Watched(Group):
    """Notes the memory of each buffer that it averages, without keeping it."""

    def __init__(self, *args):
        super().__init__(*args)
        self.averaged = []

    def all_reduce(self, buffer, *, average=False):
        self.averaged.append(weakref.ref(buffer))
        super().all_reduce(buffer, average=average)


@on_ranks(4)
def test_the_shard_of_an_all_reduce_lives_until_the_end_of_backward():
    """Without our thread, as where the device has streams. The second backward adds to gradients that are there."""
    model = Net()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _shard(model, reshard=True, mesh=mesh["shard"])
    groups = {name: dist.get_process_group_ranks(mesh[name].get_group()) for name in ("shard", "replicate")}
    opened = {name: dist.new_group(ranks, use_local_synchronization=True) for name, ranks in groups.items()}
    replicate = ring(opened["replicate"], axis="replicate", kind=Watched)
    engine = BackgroundQueue(threaded=False)
    seam = FullySharded(model, ring(opened["shard"]), engine, replicate=replicate)
    for _ in range(2):
        replicate.averaged.clear()
        model(torch.randn(3, 7)).pow(2).mean().backward()
        alive = [reference() is not None for reference in replicate.averaged]
        seam.finish()
        after = [reference() is not None for reference in replicate.averaged]
    assert len(alive) == 4  # three modules and the root
    assert all(alive)
    assert not any(after)  # they were added to gradients: only the seam kept them


@on_ranks(4)
def test_a_second_mesh_axis_of_fsdp2_itself_is_waited_for():
    model = Net()
    twin = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    _shard(model, reshard=True, mesh=mesh)
    engine = SlowEngine()
    ranks = dist.get_process_group_ranks(mesh["shard"].get_group())
    FullySharded(model, ring(dist.new_group(ranks, use_local_synchronization=True)), engine)
    difference = _train(model, twin)
    engine.close()
    assert difference < 1e-5


@on_ranks(3)
def test_what_fsdp2_computes_from_a_sum_is_waited_for():
    """fp16, whose sums FSDP2 divides afterwards, over its own collectives and over ours."""
    ours = Net().half()
    theirs = copy.deepcopy(ours)
    for model in (ours, theirs):
        _shard(model, reshard=True)
    engine = SlowEngine()
    FullySharded(ours, ring(dist.new_group()), engine)
    data = torch.randn(dist.get_world_size(), 3, 7)[dist.get_rank()].half()
    for model in (ours, theirs):
        model(data).float().pow(2).mean().backward()
    engine.close()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad.full_tensor(), rtol=1e-2, atol=1e-4)


@on_ranks(2)
def test_hooks_see_finished_gradients():
    """A user's hook on a sharded gradient sees the finished gradient."""
    model = Net()
    _shard(model, reshard=False)
    engine, seen = SlowEngine(), []
    FullySharded(model, ring(dist.new_group()), engine)
    weight = model.blocks[1][0].weight
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.full_tensor().clone()))
    model(torch.randn(3, 7)).mean().backward()
    assert torch.equal(seen[-1], weight.grad.full_tensor())
    engine.close()


@pytest.mark.parametrize(("kind", "tolerance"), [("bf16", 0.01), ("fp16", 0.001), ("int8", 0.02), ("powersgd", 0.5)])
@on_ranks(2)
def test_compression_of_sharded_gradients(kind, tolerance):
    model = Net()
    twin = copy.deepcopy(model)
    _shard(model, reshard=True)
    engine, ledger = SlowEngine(), Ledger()
    config = CommConfig(grad_compression=kind, powersgd_rank=4)
    collectives = build_collectives(config, dist.new_group(), ledger, "data")
    compression = build_compression(config, collectives)
    FullySharded(model, collectives, engine, compression=compression)
    data = torch.randn(dist.get_world_size(), 3, 7)
    model(data[dist.get_rank()]).pow(2).mean().backward()
    twin(data.view(-1, 7)).pow(2).mean().backward()
    engine.close()
    assert compression.state_dict()
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    error = sum((a.grad.full_tensor() - b.grad).pow(2).sum() for a, b in pairs) / sum(
        b.grad.pow(2).sum() for _, b in pairs
    )
    assert 0 < error.sqrt() < tolerance, error.sqrt()


def test_an_unallocated_buffer_knows_what_fsdp2_does_and_nothing_else():
    """Fails when torch changes how FSDP2 fills and empties its communication buffers."""
    import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives

    buffer = UnallocatedBuffer((8,), torch.float32, torch.device("cpu"), CopyNotes())
    grads = [torch.randn(4), torch.randn(4)]
    collectives.foreach_reduce_scatter_copy_in(grads, buffer, 2)
    assert all(a is b for a, b in zip(buffer.copies.sources, grads, strict=True))
    with pytest.raises(NotImplementedError, match="not known"):
        buffer.mul_(2)


@on_ranks(2)
def test_frozen_parameters_leave_the_keys_of_others_alone():
    """What is remembered of a parameter goes by a key that does not depend on which others are frozen."""
    model = Net()
    _shard(model, reshard=True)
    engine, ledger = SlowEngine(), Ledger()
    config = CommConfig(grad_compression="int8")
    collectives = build_collectives(config, dist.new_group(), ledger, "data")
    compression = build_compression(config, collectives)
    seam = FullySharded(model, collectives, engine, compression=compression)
    model.first.weight.requires_grad_(False)
    names = {parameter: name for name, parameter in model.named_parameters()}
    keyed = {
        seam.key(module, place): parameter
        for module in seam.modules
        for group in groups_at(module)
        for place, parameter in enumerate(sharded_parameters(group))
    }
    expected = {key for key, parameter in keyed.items() if parameter is not model.first.weight}
    assert {names[parameter] for parameter in keyed.values()} == set(names.values())
    model(torch.randn(3, 7)).pow(2).mean().backward()
    engine.close()
    assert compression.memory.keys() == expected
    for key, lost in compression.memory.items():
        assert lost.numel() >= keyed[key].numel()
