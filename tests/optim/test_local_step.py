"""Optimizers step on local shards, and closures see the parameters themselves. Adam takes torch's kernel on the host."""

import weakref

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.profiler import profile

from lightning_3d.optim.sharded_steps import fusable, step_on_shards
from tests.parity import make_trainer
from tests.workers import run
from tests.zoo.plain import MLP


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


def _module(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(4, 6, dtype=dtype)


def _steps(optimizer, parameters):
    for number in range(5):
        for parameter in parameters:
            parameter.grad = parameter.detach().sin() * (number + 1)
        optimizer.step()


def _sharded(kind, options):
    mesh = init_device_mesh("cpu", (2,))
    parameters = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in _module().parameters()]
    optimizer = kind(parameters, lr=0.1, weight_decay=0.1, **options)
    step_on_shards(optimizer)
    with profile() as seen:
        _steps(optimizer, parameters)
    fused = any("_fused_adam" in event.key for event in seen.key_averages())
    (group,) = optimizer.param_groups
    return [p.full_tensor().detach() for p in parameters], fused, group["fused"]


@pytest.mark.parametrize(
    ("kind", "options", "wanted"),
    [
        (torch.optim.AdamW, {}, True),
        (torch.optim.Adam, {"amsgrad": True}, True),
        (torch.optim.AdamW, {"foreach": False}, False),
        (torch.optim.AdamW, {"fused": False}, False),
    ],
)
def test_the_kernel_is_torchs_choice_unless_the_user_chose(kind, options, wanted):
    plain = list(_module().parameters())
    _steps(kind(plain, lr=0.1, weight_decay=0.1, **options), plain)
    for weights, fused, left in run(_sharded, kind, options, world=2, group=True, fresh=True):
        assert fused is wanted
        assert left is options.get("fused")
        for mine, theirs in zip(weights, plain, strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda: torch.optim.AdamW(_module(torch.bfloat16).parameters()),
        lambda: torch.optim.AdamW(_module().parameters(), lr=torch.tensor(0.1)),
        lambda: torch.optim.NAdam(_module().parameters()),
        lambda: torch.optim.SGD(_module().parameters(), lr=0.1),
    ],
)
def test_what_the_kernel_would_round_otherwise_or_cannot_do_is_left_alone(optimizer):
    made = optimizer()
    (group,) = made.param_groups
    for parameter in group["params"]:
        parameter.grad = torch.ones_like(parameter)
    assert not fusable(made, made.param_groups[0])
