"""The undo stack: the last change is undone first, and what needs other ranks is left out without them."""

import copy

import pytest

from lightning_3d.module.undo import UndoStack
from tests.parity import make_trainer
from tests.workers import on_ranks
from tests.zoo import MODULES


class Thing:
    kind = "class"


def test_attributes_are_put_back_in_reverse_order():
    thing = Thing()
    with UndoStack() as undo:
        undo.set(thing, "kind", "first")
        undo.set(thing, "kind", "second")
        undo.set(Thing, "kind", "changed")
        assert (thing.kind, Thing.kind) == ("second", "changed")
    assert vars(thing) == {}
    assert thing.kind == "class"


@pytest.mark.parametrize("alone", [False, True])
def test_collective_steps_need_the_other_ranks(alone):
    done, undo = [], UndoStack()
    undo.callback(done.append, "own")
    undo.collective(done.append, "of all")
    undo.abandon() if alone else undo.close()
    assert done == (["own"] if alone else ["of all", "own"])


def test_a_copy_is_empty():
    done, undo = [], UndoStack()
    undo.callback(done.append, "own")
    copy.deepcopy(undo).close()
    assert done == []


@pytest.mark.parametrize("strategy", [{"zero_stage": 1}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
@on_ranks(2, group=False)
def test_a_set_up_that_fails_leaves_nothing_on_the_module(strategy):
    module = MODULES["GPT"]()
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    own = {name: set(vars(inner)) for name, inner in module.named_modules() if name}

    def fail():
        assert any("forward" in vars(inner) for inner in module.modules())  # it is placed by now
        raise ZeroDivisionError

    module.configure_optimizers = fail
    with pytest.raises(ZeroDivisionError):
        make_trainer(2, {**strategy, "recompute": "full"}, quiet=True, max_epochs=1).fit(module)
    after = {name: set(vars(inner)) - own[name] for name, inner in module.named_modules() if name}
    assert {name: parameter.shape for name, parameter in module.named_parameters()} == shapes
    assert not any(parameter.is_meta or "DTensor" in type(parameter).__name__ for parameter in module.parameters())
    assert {name: attributes for name, attributes in after.items() if attributes} == {}
