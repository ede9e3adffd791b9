"""Process groups are opened once and used by one run after the other."""

import gc
import multiprocessing
from datetime import timedelta

import pytest
import torch
from lightning.pytorch import Callback
from torch import distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor, Replicate

from lightning_3d.layout import Layout
from lightning_3d.ranks.groups import open_groups
from tests.parity import in_turn, make_trainer
from tests.workers import on_ranks, run
from tests.zoo.language import GPT


def _trainer(world, callbacks=(), **options):
    return make_trainer(world, options, callbacks=[*callbacks])


@pytest.mark.parametrize(
    "options",
    in_turn([{"zero_stage": 3, "tensor_parallel_size": 2}, {"zero_shard_size": 2}, {"zero_stage": 0, "grad_sync": "hierarchical"}], 2),
    ids=str,
)  # fmt: skip
@on_ranks(4, group=False)
def test_later_runs_use_the_groups_of_the_first(options):
    """Three more by the same Trainer, and one by another."""
    registered = distributed_c10d._world.pg_map
    module, trainer = GPT(), _trainer(4, **options)
    trainer.fit_loop.max_epochs = 1
    trainer.fit(module)
    counts = [len(registered)]
    trainer.validate(module, verbose=False)
    trainer.validate(module, verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    counts.append(len(registered))
    _trainer(4, **options).validate(module, verbose=False)
    assert [*counts[1:], len(registered)] == [counts[0]] * 2


class _Divide(Callback):
    def on_train_batch_start(self, *_):
        raise ZeroDivisionError


class _Inner(Callback):
    """Starts another run inside of one."""

    def on_train_batch_start(self, trainer, *_):
        _trainer(2).validate(module := GPT(), verbose=False)
        self.apart = module.device_mesh is not trainer.strategy.mesh


def _groups_of_runs():
    """For each run the first one that had the same groups, and whether the one inside the last had others."""
    first, fails, last, outer = _trainer(2), _trainer(2, [_Divide()]), _trainer(2), _trainer(2, [inner := _Inner()])
    modules = [GPT() for _ in range(4)]
    first.validate(modules[0], verbose=False)
    with pytest.raises(ZeroDivisionError):
        fails.fit(modules[1])
    last.validate(modules[2], verbose=False)
    outer.fit_loop.max_epochs = 1
    outer.fit(modules[3])
    meshes = [module.device_mesh for module in modules]
    return [next(place for place, one in enumerate(meshes) if one is mesh) for mesh in meshes], inner.apart


def test_a_run_after_one_that_failed_on_all_ranks_uses_its_groups_and_one_inside_another_gets_its_own():
    """All ranks are proven in step after the failure. A run inside of another is not."""
    assert run(_groups_of_runs, world=2) == [([0, 0, 0, 0], True)] * 2


@on_ranks(2, group=False)
def test_workers_of_a_dataloader_leave_the_groups_of_earlier_runs_alone():
    """A process is forked while a group is garbage, and collects garbage."""
    _trainer(2).validate(GPT(), verbose=False)
    group = dist.new_group()
    dist.destroy_process_group(group)
    gc.disable()  # in this process, which would end the group before
    cycle = [group]
    cycle.append(cycle)
    del group, cycle
    worker = multiprocessing.get_context("fork").Process(target=gc.collect)
    worker.start()
    worker.join(20)
    worker.kill()
    gc.enable()
    assert worker.exitcode == 0


def _opened(sizes):
    """The ranks of each group that this rank opens."""
    opened, new_group = [], dist.new_group

    def noted(ranks, *rest, **options):
        opened.append(ranks)
        return new_group(ranks, *rest, **options)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(dist, "new_group", noted)
        open_groups(Layout(**sizes), dist.get_rank(), "cpu", timedelta(seconds=30))
    return opened


def test_a_rank_opens_groups_of_its_own_only():
    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 2, "zero_stage": 1}
    for rank, opened in enumerate(run(_opened, sizes, world=4, group=True, fresh=True)):
        assert 1 <= len(opened) <= 3  # not one for each coordinate of the other axes
        assert all(rank in ranks for ranks in opened)


def _computed(sizes):
    """True where the result of an operation on a DTensor has the mesh of its argument."""
    axes = open_groups(Layout(**sizes), dist.get_rank(), "cpu", timedelta(seconds=30))
    tensor = DTensor.from_local(torch.ones(2), axes.mesh["tensor_parallel"], [Replicate()])
    return torch.zeros_like(tensor).device_mesh is tensor.device_mesh


@pytest.mark.parametrize("axis", ["data", "pipeline"])  # torch's groups have other names, and the meshes are equal
def test_operations_after_a_run_have_no_group_of_that_run(axis):
    assert run(_computed, {f"{axis}_parallel_size": 2, "tensor_parallel_size": 2}, world=4, group=True) == [True] * 4
