"""A step may look at its optimizers before the Trainer has made them."""

import warnings

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.utils.data import DataLoader

from lightning_3d import Strategy3D
from lightning_3d.sandbox.trial import HELD, optimizers_on_demand, trial
from tests.parity import QUIET
from tests.workers import run
from tests.zoo.batchless import MLP, vectors


class Rates(MLP):
    def __init__(self, asks=True):
        super().__init__()
        self.asks, self.configured = asks, 0

    def configure_optimizers(self):
        self.configured += 1
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)]

    def training_step(self, batch, batch_idx):
        if self.asks:
            self.log("rate", self.optimizers().param_groups[0]["lr"])
            self.log("same", self.trainer.optimizers[0].param_groups[0]["lr"])
            self.log("last", self.lr_schedulers().get_last_lr()[0])
        return super().training_step(batch, batch_idx)


def attached(module):
    trainer = Trainer(**QUIET, devices=1)
    trainer.strategy.connect(module)
    module.trainer = trainer
    trainer.state.fn = TrainerFn.FITTING
    return trainer


def test_optimizers_are_made_when_asked_for_and_forgotten():
    module = Rates()
    strategy = attached(module).strategy
    before = {name: vars(strategy)[name] for name in HELD}  # fails where Lightning calls them otherwise
    with optimizers_on_demand(module):
        assert module.configured == 0
        assert module.optimizers().param_groups[0]["lr"] == pytest.approx(0.01 / 3)
        assert module.lr_schedulers().get_last_lr() == [pytest.approx(0.01 / 3)]
        assert module.optimizers(use_pl_optimizer=False) is module.trainer.optimizers[0]
        assert module.configured == 1
    assert {name: vars(strategy)[name] for name in HELD} == before


def test_an_optimizer_that_the_module_keeps_is_left_alone():
    module = Rates()
    attached(module)
    module.kept = torch.optim.SGD(module.parameters(), lr=0.1)
    with optimizers_on_demand(module):
        assert module.optimizers() == []
    assert module.configured == 0


def rates(axis, world):
    module = Rates()
    strategy = Strategy3D(quiet=True, **{axis: world}) if axis else "auto"
    data = DataLoader([vectors(8, 0), vectors(8, 1)], batch_size=None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*could not be run")
        trainer = Trainer(**QUIET, max_epochs=2, limit_val_batches=0, devices=world, strategy=strategy)
        trainer.fit(module, data)
    return {name: trainer.callback_metrics[name].item() for name in ("rate", "same", "last")}


@pytest.mark.parametrize("axis", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_a_step_logs_its_learning_rate(axis):
    (wanted,) = run(rates, None, 1, world=1)
    assert run(rates, axis, 2, world=2)[-1] == pytest.approx(wanted)


class Irreps(tuple):
    """As e3nn's: a tuple that refuses its length."""

    def __len__(self):
        raise NotImplementedError


def test_a_tuple_without_a_length_is_left_as_it_is():
    module = MLP()
    module.irreps = given = Irreps((1, [2]))
    with trial(module, gradients=False):
        module.irreps[1].append(3)
    assert module.irreps is given


CALLS, GROUPS, REGISTERED = [0], {}, set()
PARTS = dict.fromkeys("abcdefgh", 0)
REQUEST = type("Unbound", (), {"__class__": property(lambda _: 1 / 0)})()  # as flask's outside of a request
total, ready = 0, False
latest, table = None, torch.zeros(2)


class Shared(nn.Module):
    """Counts in its class and in its file, and keeps an object in a dict."""

    calls, seen = 0, []

    def forward(self, x):
        global total, ready, latest, table
        latest, table = x, x
        total += 0.5
        ready = True
        REGISTERED.add("operator")
        PARTS.update(dict.fromkeys("hgcf", 1))
        type(self).calls += 1
        CALLS[0] += 1
        CALLS.append(len(x))
        self.seen.append(x)
        GROUPS["count"] = GROUPS.get("count", 0) + 1
        GROUPS.setdefault("made", object())
        return x


def test_what_classes_and_files_keep_for_all_modules_is_put_back():
    module, x = Shared(), torch.ones(2)
    with trial(module, gradients=False, logs=False):
        module(x)
        assert (total, Shared.calls, len(Shared.seen), CALLS, GROUPS["count"]) == (0.5, 1, 1, [1, 2], 1)
    assert (total, Shared.calls, Shared.seen, CALLS) == (0, 0, [], [0])
    assert [*PARTS.items()] == [(name, 0) for name in "abcdefgh"]  # ranks walk through them in this order
    # registered once in a process
    assert ([*GROUPS], REGISTERED, ready) == (["made"], {"operator"}, True)
    assert latest is x and table is x  # made where a flag was


class Carries(nn.Module):
    """Carries tensors in names that its class has not or has empty, and in place."""

    latest, table = None, torch.zeros(2)

    def forward(self, x):
        Carries.latest, Carries.first = x, x
        setattr(self, "__results", x)  # a cache of a decorator, outside of the class
        self.table.add_(x)
        return x


def test_new_names_of_a_class_and_its_tensors_are_put_back():
    with trial(carries := Carries(), gradients=False, logs=False):
        carries(torch.ones(2))
        assert Carries.table.all()
    assert Carries.latest is None and not hasattr(Carries, "first") and not Carries.table.any()
    assert not hasattr(carries, "__results")


def _scale_of_the_first_call():
    scale, ready, state = 0.0, False, {"ready": False, "scale": 0.0}

    def multiply(x):
        nonlocal scale, ready
        if not ready and not state["ready"]:
            scale, ready = 2.0, True
            state.update(ready=True, scale=5.0)
        return x * scale * state["scale"]

    return multiply


def _number_of_the_first_call():
    number: int

    def multiply(x):
        nonlocal number
        try:
            number += 1
        except NameError:
            number = 10
        return x * number

    return multiply


@pytest.mark.parametrize("make", [_scale_of_the_first_call, _number_of_the_first_call])
def test_what_a_function_makes_at_its_first_call_is_made_again(make):
    """A scale was 0 beside a flag that said that it was made. A variable that was empty stayed filled."""
    module = nn.Identity()
    module.multiply = make()
    for _ in range(2):
        with trial(module, gradients=False, logs=False):
            assert module.multiply(torch.ones(1)) == 10


def test_compiled_blocks_run_uncompiled():
    """Under the modes of a trial torch would warn of our code, and give up to compile the block for good."""
    graphs = []
    backend = lambda graph, _: graphs.append(graph) or graph.forward  # noqa: E731
    module = nn.Sequential(torch.compile(nn.Linear(4, 4), backend=backend))
    with trial(module, gradients=True):
        module(torch.ones(2, 4))
    assert not graphs
    module(torch.ones(2, 4))
    assert graphs
