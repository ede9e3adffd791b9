"""Parts of a block that are called by themselves: seen in time the block stays whole, later it is refused."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_3d.errors import TensorPlanError
from lightning_3d.module.undo import UndoStack
from lightning_3d.tensor.apply import apply_tensor
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.plan_module import plan_tensor
from tests.workers import on_ranks
from tests.zoo.sized import Residual

X = torch.ones(2, 8)


class Tapped(nn.Module):
    """Its layers are one block, an `nn.Sequential`, which it may call or go through."""

    def __init__(self, tap):
        super().__init__()
        self.tap = tap
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x):
        if not self.tap:
            return self.layers(x)
        left = []
        for layer in self.layers:
            left.append(layer(x if not left else left[-1]))
        return left[-1] + left[0].mean()


class Written(Residual):
    """A block whose parts its parent calls, past its own forward."""

    def forward(self, x):
        return self.down(self.up(x).relu())


class Parent(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Written(), Written()])

    def forward(self, x):
        for block in self.blocks:
            hidden = block.up(x).relu()
            x = block.down(hidden) + hidden.sum()
        return x


class Twice(nn.Module):
    """One block under two names, or two blocks that hold the same layers, each of which calls them as its own."""

    def __init__(self, second=None):
        super().__init__()
        self.first = nn.ModuleList([Written()])
        self.second = nn.ModuleList([second or self.first[0]])
        self.second[0].up, self.second[0].down = self.first[0].up, self.first[0].down

    def forward(self, x):
        return self.second[0](self.first[0](x))


def plan(module, **options):
    return plan_tensor(module, 2, calls=record_calls(module, lambda: module(X)), **options)


@pytest.mark.filterwarnings("ignore:These stay unsplit")
@pytest.mark.parametrize(("module", "names"), [(Tapped(True), ["layers"]), (Parent(), ["blocks.0", "blocks.1"])])
def test_a_block_whose_parts_are_called_stays_whole(module, names):
    found = plan(module)
    assert not found.splits
    assert list(found.unsplit) == names
    assert all("modules inside it are called from outside" in why for why in found.unsplit.values())


def test_a_module_that_is_one_block_gives_what_it_always_gives_while_it_is_watched():
    module, seen = Written(), []  # its name is the empty text
    record_calls(module, lambda: seen.append(module(X)))
    torch.testing.assert_close(seen[0], module(X).detach())


def test_one_that_is_called_itself_is_split():
    assert plan(Tapped(False)).splits


@pytest.mark.filterwarnings("ignore:These stay unsplit")
def test_blocks_that_hold_the_same_layers_stay_whole():
    assert not plan(Twice(Written())).splits


@on_ranks(2)
def test_a_block_under_two_names_is_divided_once():
    module = Twice()
    expected = module(X).detach()
    found = plan(module)
    assert list(found.units) == ["first.0"]
    assert {name.split(".")[0] for name in found.splits} == {"first", "second"}
    undo = UndoStack()
    apply_tensor(module, found, init_device_mesh("cpu", (2,), mesh_dim_names=("tensor_parallel",)), undo)
    torch.testing.assert_close(module(X), expected)
    undo.close()
    assert module.first[0].up.weight.shape == (16, 8)
    torch.testing.assert_close(module(X), expected)


@pytest.mark.filterwarnings("ignore:These stay unsplit")
def test_a_plan_given_for_it_is_refused():
    with pytest.raises(
        TensorPlanError, match=r"layers does not compute the same.*modules inside it are called from outside"
    ):
        plan(Tapped(True), tensor_plan={"layers.0": "column", "layers.2": "row"})
    assert not plan(Tapped(True), tensor_plan={"layers": "whole"}).splits


@on_ranks(2)
def test_a_part_called_later_is_refused():
    module = Tapped(False)
    reference = copy.deepcopy(module)
    undo = UndoStack()
    apply_tensor(module, plan(module), init_device_mesh("cpu", (2,), mesh_dim_names=("tensor_parallel",)), undo)
    for each in (module, copy.deepcopy(module)):
        torch.testing.assert_close(each(X), reference(X))
        each.tap = True
        with pytest.raises(TensorPlanError, match=r'layers\.0 was called outside of.*tensor_plan={"layers": "whole"}'):
            each(X)
    with pytest.raises(TensorPlanError, match=r"layers\.2 was called outside of"):
        module.layers[2:](torch.ones(2, 16))
    undo.close()
    reference.tap = True
    torch.testing.assert_close(module(X), reference(X))
