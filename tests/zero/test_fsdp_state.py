"""The private state of FSDP2 that we use is still there and does what we rely on; fails when torch changes it."""

import copy

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_3d.zero import fsdp_private
from tests.workers import run


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


def _sharded():
    torch.manual_seed(0)
    net = Net()
    mesh = init_device_mesh("cpu", (2,))
    with fsdp_private.same_classes([net.first, net]):
        fully_shard(net.first, mesh=mesh, reshard_after_forward=False)
        fully_shard(net, mesh=mesh, reshard_after_forward=False)
    fsdp_private.make_root(net)
    return net


def _step_by_hand():
    net = _sharded()
    assert type(net) is Net
    assert type(net.first) is nn.Linear
    groups = fsdp_private.param_groups(net)
    assert len(groups) == 2
    assert copy.deepcopy(net) is not net
    fsdp_private.open_step(net)
    for group in groups:
        fsdp_private.gather(group)
    loss = net(torch.ones(3, 4)).sum()
    loss.register_hook(lambda grad: fsdp_private.start_backward(net, grad))
    loss.backward()
    grads = {name: p.grad.full_tensor() for name, p in net.named_parameters()}
    assert all(isinstance(p, DTensor) for p in net.parameters())
    fsdp_private.accumulate_only(net, groups, True)
    for _ in range(2):
        for group in groups:
            fsdp_private.gather(group)
        net(torch.ones(3, 4)).sum().backward()
    fsdp_private.accumulate_only(net, groups, False)
    for p in net.parameters():
        assert not isinstance(p, DTensor)
    fsdp_private.reduce_now(net, groups)
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.grad.full_tensor(), 3 * grads[name])
    fsdp_private.reshard(groups)
    for p in net.parameters():
        p.grad = None
    fsdp_private.remove(net)
    assert all(fsdp_private.state_of(module) is None for module in net.modules())
    assert not net.first._forward_pre_hooks
    return True


def test_a_step_opened_and_closed_by_hand():
    assert run(_step_by_hand, world=2, group=True) == [True, True]
