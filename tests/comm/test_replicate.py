"""Replicas end every backward with the mean gradient, whatever each rank used."""

import copy
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.axes.group import Group
from lightning_3d.axes.ledger import Ledger
from lightning_3d.comm.background_queue import BackgroundQueue
from lightning_3d.comm.replicate import ReplicatedGradients
from lightning_3d.errors import DivergenceError, UnsupportedError
from lightning_3d.module.undo import UndoStack
from lightning_3d.zero.data_parallel import ReplicatedData
from tests.axes.rings import ring
from tests.comm.slow import SlowEngine
from tests.workers import WorkerError, on_ranks, run


class Net(nn.Module):
    """Large and small gradients, branches, a scalar, something never used."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 4200), nn.Tanh(), nn.Linear(4200, 16))
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Linear(16, 16)

    def forward(self, x, branch):
        x = self.body(x) * self.scale
        return self.branches[branch](x) if branch < 3 else x


class Case:
    def __init__(self, **options):
        torch.manual_seed(0)
        self.model = Net()
        self.twin = copy.deepcopy(self.model)
        self.engine, self.ledger = SlowEngine(), Ledger()
        group = ring(dist.new_group(), self.ledger)
        self.replicas = ReplicatedGradients(
            list(self.model.parameters()), group, self.engine, dist.group.WORLD, bucket_mb=0.001, **options
        )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (self.model, self.twin)]

    def backward(self, branch):
        """One backward on each; `branch(rank)` is what a rank uses."""
        data = torch.randn(self.size, 3, 16)
        self.model(data[self.rank], branch(self.rank)).pow(2).mean().backward()
        self.replicas.finish()
        for rank in range(self.size):
            (self.twin(data[rank], branch(rank)).pow(2).mean() / self.size).backward()

    def step(self):
        for (name, a), b in zip(self.model.named_parameters(), self.twin.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None), name
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, atol=1e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def close(self):
        for a, b in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
            others = [torch.empty_like(a) for _ in range(self.size)]
            dist.all_gather(others, a.detach())
            assert all(torch.equal(other, a) for other in others)
        self.engine.close()


def _same_everywhere(accumulate):
    case = Case()
    for _ in range(4):
        for micro in range(accumulate):
            case.replicas.accumulate_only(micro < accumulate - 1)
            case.backward(lambda rank: 0)
        case.step()
    case.close()
    if case.size == 1:
        assert case.ledger.rows() == []
        return
    counted = sum(p.numel() for p in case.model.parameters()) - 3 * 272
    sent = case.ledger.bytes() / 4 / (2 * (case.size - 1) / case.size)
    assert counted * 4 <= sent < counted * 4 + 64 * case.size  # every used gradient once per step, padding aside


@pytest.mark.parametrize(("world", "accumulate"), [(1, 1), (2, 1), (2, 3), (3, 1)])
def test_parity_with_one_process(world, accumulate):
    run(_same_everywhere, accumulate, world=world, group=True)


def _different(accumulate):
    case = Case()
    for step in range(5):
        for micro in range(accumulate):
            case.replicas.accumulate_only(micro < accumulate - 1)
            case.backward(lambda rank, turn=step + micro: (rank + turn) % 4)
        case.step()
    case.close()


@pytest.mark.parametrize(("world", "accumulate"), [(2, 1), (3, 2)])
def test_ranks_that_use_different_parameters(world, accumulate):
    run(_different, accumulate, world=world, group=True)


@on_ranks(2)
def test_freezing_and_unfreezing():
    case = Case()
    for step in range(5):
        for model in (case.model, case.twin):
            model.body.requires_grad_(step in (1, 4))
            model.branches[1].requires_grad_(step != 2)
        case.backward(lambda rank: 1 if rank == 0 else 3)
        case.step()
    case.close()


@on_ranks(2)
def test_several_backwards_in_one_step():
    """Manual optimization: two losses, one after the other, gradients of both kept."""
    case = Case()
    for _ in range(3):
        case.backward(lambda rank: 0)
        case.backward(lambda rank: rank)
        case.step()
    case.close()


@on_ranks(2)
def test_reduce_after_holding():
    """A pipeline: all microbatches held, one reduce."""
    case = Case()
    for _ in range(2):
        case.replicas.accumulate_only(True)
        for micro in range(3):
            case.backward(lambda rank, micro=micro: micro)
        case.replicas.accumulate_only(False)
        assert case.ledger.rows() == []
        case.replicas.reduce()
        case.step()
        case.ledger.reset()
    case.close()


@on_ranks(2)
def test_detach():
    case = Case()
    case.replicas.detach()
    case.model(torch.randn(3, 16), 0).mean().backward()
    assert case.ledger.rows() == []
    case.engine.close()


@on_ranks(2)
def test_ranks_that_freeze_differently_are_told():
    case = Case()
    case.model.unused.requires_grad_(case.rank == 0)
    with pytest.raises(DivergenceError, match="Freeze and unfreeze the same"):
        case.replicas.finish()
    case.engine.close()


class Noted(Group):
    def begin_all_reduce(self, buffer, *, average=False):
        end, size = super().begin_all_reduce(buffer, average=average), buffer.numel()
        self.events.append("begin")

        def noted():
            self.events.append("end")
            end()

        assert size
        return noted


def _on_streams():
    """Where the library has streams there is no thread of ours: buckets are under way while backward continues."""
    layer = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    collectives = Noted(dist.new_group(), "data", Ledger())
    engine = BackgroundQueue(threaded=False)
    replicas = ReplicatedGradients(list(layer.parameters()), collectives, engine, dist.group.WORLD, bucket_mb=5e-4)
    for _ in range(2):
        collectives.events = events = []
        layer.zero_grad()
        handle = layer[0].weight.register_hook(lambda grad, events=events: events.append("last gradient"))
        layer(torch.full((1, 8), float(dist.get_rank()))).sum().backward()
        replicas.finish()
        handle.remove()
    homes = [parameter.grad.untyped_storage().data_ptr() for parameter in layer.parameters()]
    return events, len(set(homes)), layer[0].weight.grad[0, 0].item()


def test_buckets_are_under_way_during_backward_and_gradients_are_views_of_them():
    (events, homes, first), (other, _, second) = run(_on_streams, world=2, group=True)
    assert events == other
    assert events[0] == "begin"
    assert events.index("last gradient") < events.index("end")
    assert events.count("begin") == events.count("end") == homes < 6
    assert first == second != 0


@on_ranks(2)
def test_a_gradient_that_comes_twice_in_one_backward_is_refused():
    engine = SlowEngine()
    layer = nn.Linear(512, 512)
    replicas = ReplicatedGradients(list(layer.parameters()), ring(dist.new_group()), engine, dist.group.WORLD)
    x = torch.randn(2, 512, requires_grad=True)
    y = checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)
    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        y.sum().backward()
    replicas.detach()
    engine.close()


def _late_hook(takes=False):
    """Each gradient is the hook's where it is sent: 0 on rank 0, and unchanged on rank 1, or none."""
    weight, engine = nn.Parameter(torch.ones(2)), BackgroundQueue()
    replicas = ReplicatedGradients([weight], ring(dist.new_group()), engine, dist.group.WORLD)
    data = ReplicatedData(replicas, UndoStack())

    def slow(parameter):
        time.sleep(0.1)
        parameter.grad = None if takes else parameter.grad * dist.get_rank()

    weight.register_post_accumulate_grad_hook(slow)
    loss = weight.sum()
    data.before_backward(loss)
    loss.backward()
    data.after_backward()
    engine.close()
    return weight.grad.tolist()


def test_gradients_are_sent_behind_hooks_that_come_later():
    assert run(_late_hook, world=2, group=True) == [[0.5, 0.5]] * 2
    with pytest.raises(WorkerError, match=r"shape \(2,\) takes it away .* steps in the backward"):
        run(_late_hook, True, world=2, group=True)


@on_ranks(2)
def test_gradients_keep_their_memory_format():
    layer, engine = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last), SlowEngine()
    group = ring(dist.new_group())
    replicas = ReplicatedGradients(list(layer.parameters()), group, engine, dist.group.WORLD)
    layer(torch.full((1, 4, 5, 5), float(dist.get_rank())).to(memory_format=torch.channels_last)).sum().backward()
    before = layer.weight.grad.stride()
    replicas.finish()
    engine.close()
    assert before == layer.weight.grad.stride() == layer.weight.stride()
    assert layer.weight.grad[0, 0, 0, 0] == 4.5


def _sparse():
    engine = SlowEngine()
    table = nn.Embedding(10, 4, sparse=True)
    nn.init.ones_(table.weight)
    replicas = ReplicatedGradients([table.weight], ring(dist.new_group()), engine, dist.group.WORLD)
    table(torch.tensor([dist.get_rank(), 5])).sum().backward()
    replicas.finish()
    engine.close()
    assert not table.weight.grad.is_sparse
    return table.weight.grad.sum(1).tolist()


def test_sparse_gradients_become_dense():
    assert run(_sparse, world=2, group=True)[1] == [2, 2, 0, 0, 0, 4, 0, 0, 0, 0]
