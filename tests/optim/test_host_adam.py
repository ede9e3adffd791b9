"""Adam on shards in host memory takes torch's fused kernel where the user left the choice to torch, and only there."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.profiler import profile

from lightning_3d.optim.sharded_steps import fusable, step_on_shards
from tests.workers import run


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
