"""Layers around a forward stand in the order of their ranks, and nothing is left of them."""

import copy
import inspect
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_3d.errors import UnsupportedError
from lightning_3d.module.forward import ForwardLayer, Layer, add_layer, is_plain, ranks_of, without_layers
from lightning_3d.module.undo import UndoStack


class Noting(ForwardLayer):
    def __init__(self, module, said):
        super().__init__(module)
        self.said = said

    def __call__(self, *args, **kwargs):
        self.said.append(self.rank)
        return self.next(*args, **kwargs)


RANKS = Layer.SPLIT, Layer.RECOMPUTE, Layer.GATE
KINDS = {rank: type(rank.name, (Noting,), {}, rank=rank) for rank in RANKS}
for kind in KINDS.values():
    globals()[kind.__name__] = kind  # pickle finds classes by name


def layered(module, ranks, undo):
    said = []
    for rank in ranks:
        add_layer(KINDS[rank](module, said), undo)
    return said


@pytest.mark.parametrize("ranks", list(itertools.permutations(RANKS)))
def test_the_rank_decides_and_not_the_time(ranks):
    module, x = nn.Linear(2, 2), torch.rand(1, 2)
    expected = module(x)
    with UndoStack() as undo:
        said = layered(module, ranks, undo)
        assert torch.equal(module(x), expected)
        assert said == [Layer.GATE, Layer.RECOMPUTE, Layer.SPLIT]
        assert inspect.signature(module.forward) == inspect.signature(nn.Linear(2, 2).forward)
        assert ranks_of(module) == list(RANKS)
    assert "forward" not in vars(module)


@pytest.mark.parametrize("ranks", [RANKS, RANKS[::-1]])
def test_the_users_own_forward_is_inside_and_comes_back(ranks):
    module, x = nn.Linear(2, 2), torch.rand(1, 2)
    module.forward = own = lambda x: 2 * F.linear(x, module.weight, module.bias)
    with UndoStack() as undo:
        said = layered(module, ranks, undo)
        assert torch.equal(module(x), own(x))
        with without_layers(module):
            assert module.forward is own
        above = module.forward
        module.forward = lambda x: above(x) + 1  # the user's code may do this in a hook
        add_layer(KINDS[Layer.RECOMPUTE](module, said), undo)
        assert torch.equal(module(x), own(x) + 1)
        assert len(said) == 7
    assert torch.equal(module(x), own(x) + 1)
    assert len(said) == 7
    module.forward = above  # as libraries take theirs back
    assert torch.equal(module(x), own(x))
    assert len(said) == 7


def test_a_builtin_has_no_signature():
    module = nn.Identity()
    module.forward = torch.neg
    with UndoStack() as undo:
        layered(module, RANKS, undo)
        assert torch.equal(module(torch.ones(1)), -torch.ones(1))


def test_a_module_that_has_methods_only_gets_layers():
    """As geoopt's manifolds, which have a parameter, so that they are blocks of a pipeline."""
    module = type("Manifold", (nn.Module,), {"forward": NotImplemented})()
    with UndoStack() as undo:
        layered(module, RANKS, undo)
    assert module.forward is NotImplemented


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_computes_with_its_own_weights(copied):
    module, x = nn.Linear(2, 2), torch.rand(1, 2)
    with UndoStack() as undo:
        layered(module, RANKS, undo)
        other = copied(module)
        nn.init.zeros_(module.weight)
        assert not torch.equal(other(x), module(x))
        assert ranks_of(other) == list(RANKS)


def test_what_is_plain():
    module = nn.Linear(2, 2)
    with UndoStack() as undo:
        layered(module, [Layer.RECOMPUTE, Layer.GATE], undo)
        assert is_plain(module, nn.Linear)
        layered(module, [Layer.SPLIT], undo)
        assert not is_plain(module, nn.Linear)
        assert is_plain(module, nn.Linear, up_to=Layer.OWN)
    assert is_plain(module, nn.Linear)
    module.forward = nn.Linear(2, 2).forward
    assert not is_plain(module, nn.Linear)


def clone(module):
    """A copy with other weights and the same attributes, as learn2learn makes one."""
    twin = module.__new__(type(module))
    twin.__dict__ = {**vars(module), "_parameters": {name: own * 2 for name, own in module.named_parameters()}}
    return twin


def test_a_copy_of_the_attributes_computes_with_its_own_weights():
    module, x = nn.Linear(2, 2), torch.rand(1, 2)
    with UndoStack() as undo:
        said = layered(module, [Layer.RECOMPUTE], undo)
        twin = clone(module)
        torch.testing.assert_close(twin(x), 2 * module(x))
        assert said == [Layer.RECOMPUTE]
        assert torch.equal(copy.copy(module)(x), module(x))  # it has the same weights
        layered(module, [Layer.SPLIT], undo)
        assert torch.equal(copy.copy(module)(x), module(x))
        with pytest.raises(UnsupportedError, match=r"copy of a Linear .* weights of its own .* \(split\)"):
            twin(x)


def test_a_copy_has_the_forward_that_its_user_gave_the_module():
    module, x = nn.Linear(2, 2), torch.rand(1, 2)
    module.forward = lambda x: F.linear(x, module.weight, module.bias)
    wanted = clone(module)(x)
    with UndoStack() as undo:
        layered(module, RANKS, undo)
        assert torch.equal(clone(module)(x), wanted)
