"""The run ahead of planning leaves a module as it was, and refuses nothing that training could keep."""

import pytest
import torch
from torch import nn

from lightning_3d.errors import WritesError
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.plan_module import plan_tensor


class Rotary(nn.Module):
    """Fills a table when it is first called, as wide as it needs it then."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("table", torch.empty(0), persistent=False)
        self.register_buffer("later", None)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        if len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1], dtype=x.dtype).cos()
            self.later = torch.ones(3)
        return x + self.down(self.up(x * self.table[: x.shape[1], None]).tanh())


def test_buffers_that_are_filled_when_they_are_needed_are_as_before():
    module, x = nn.ModuleDict({"blocks": nn.ModuleList([Rotary(), Rotary()])}), torch.randn(2, 8, 16)

    def run():
        return module["blocks"][1](module["blocks"][0](x))

    tables = [block.table for block in module["blocks"]]
    calls = record_calls(module, run)
    for block, table in zip(module["blocks"], tables, strict=True):
        assert block.table is table
        assert block.later is None
        assert not block.calls
    assert set(plan_tensor(module, 2, calls=calls).units) == {"blocks.0", "blocks.1"}


class Taught(nn.Module):
    def __init__(self, registered, convert=True):
        super().__init__()
        self.convert = convert
        self.block, self.teacher = nn.Linear(4, 4), [nn.Linear(4, 4)]
        if registered:
            self.held = self.teacher[0]

    def forward(self, x):
        dtype = torch.float64 if self.convert else x.dtype
        return self.block(x) - self.teacher[0].to(dtype)(x.to(dtype))


def test_moving_a_module_that_is_not_part_of_it_is_no_write():
    module = Taught(False)
    record_calls(module, lambda: module(torch.randn(2, 4)))


def test_converting_to_the_dtype_it_has_is_no_write():
    """`module.to` assigns each parameter to its own `.data`, as the router of Switch Transformers does in forward."""
    module = Taught(True, convert=False)
    record_calls(module, lambda: module(torch.randn(2, 4)))


def test_assigning_to_a_weight_of_its_own_is_one():
    module = Taught(True)
    with pytest.raises(WritesError, match=r"The step changes 'held.weight' in place.* keep their dtype and shape"):
        record_calls(module, lambda: module(torch.randn(2, 4)))
