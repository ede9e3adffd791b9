"""Optimizers step on local shards, and closures still see the parameters themselves."""

import weakref

import torch
from lightning.pytorch import seed_everything
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_3d.optim.sharded_steps import step_on_shards
from tests.parity import make_trainer
from tests.workers import run
from tests.zoo.vectors import MLP


def _closures():
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(8.0).view(4, 2)
    parameter = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    seen, freed = [], []
    undo = step_on_shards(optimizer)

    def closure():
        seen.append(isinstance(optimizer.param_groups[0]["params"][0], DTensor))
        before = weakref.ref(parameter.grad.to_local().untyped_storage()) if seen[1:] else lambda: None
        optimizer.zero_grad()
        freed.append(before() is None)
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    for _ in range(2):
        loss = optimizer.step(closure)
    kept = isinstance(optimizer.state[parameter]["momentum_buffer"], DTensor)
    undo()
    return loss.full_tensor().item(), parameter.full_tensor().detach(), seen, freed, kept


def test_a_closure_computes_on_the_parameters_themselves():
    whole = nn.Parameter(torch.arange(8.0).view(4, 2))
    optimizer = torch.optim.SGD([whole], lr=0.1, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        loss = (whole**2).sum()
        loss.backward()
        optimizer.step()
    for got, weights, seen, freed, kept in run(_closures, world=2, group=True, fresh=True):
        assert seen == [True, True]
        assert freed == [True, True]
        assert kept
        assert abs(got - loss.item()) < 1e-4
        torch.testing.assert_close(weights, whole.detach())


def _objects():
    """What the optimizer and others see in three steps, by identity; the third begins with a state of the user's."""
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)]))
    inside = []

    class Noted(torch.optim.Adam):
        def step(self, closure=None):
            (stand_in,) = self.param_groups[0]["params"]
            result = super().step(closure)
            inside.append((stand_in, self.state[stand_in], self.state[stand_in]["exp_avg"]))
            return result

    optimizer, outside = Noted([parameter]), []
    undo = step_on_shards(optimizer)
    for step in range(4):
        if step == 3:
            state = optimizer.state[parameter]
            state["exp_avg"] = distribute_tensor(torch.full((4, 2), 9.0), mesh, [Shard(0)])
        parameter.grad = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
        optimizer.step()
        outside.append((optimizer.state[parameter], optimizer.state[parameter]["exp_avg"]))
    undo()
    assert len({id(stand_in) for stand_in, _, _ in inside}) == 1
    assert inside[1][1] is inside[2][1]
    assert inside[1][2] is inside[2][2]
    assert outside[0][0] is outside[1][0]
    assert outside[0][1] is outside[1][1]
    assert inside[3][2] is not inside[2][2]
    return outside[3][1].full_tensor()


def test_tensors_of_a_step_are_those_of_the_next_unless_the_user_replaces_them():
    for moment in run(_objects, world=2, group=True, fresh=True):
        torch.testing.assert_close(moment, torch.full((4, 2), 0.9 * 9.0 + 0.1))


def _after_teardown():
    seed_everything(1, verbose=False)
    module = MLP()
    trainer = make_trainer(2, {}, max_steps=2)
    trainer.fit(module)
    batch = next(iter(module.train_dataloader()))
    module.log = lambda *_, **__: None
    with torch.no_grad():
        return trainer.strategy.training_step(batch, 0).item(), module.training_step(batch, 0).item()


def test_a_step_after_the_run_is_the_users_own():
    for through_strategy, own in run(_after_teardown, world=2):
        assert through_strategy == own
