"""Random streams of a step: their states are read and written once around it, and in no layout that shares one stream."""

from collections import Counter
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from lightning_3d import Strategy3D
from lightning_3d.layout import Layout
from lightning_3d.ranks.random_streams import StepRandom
from tests.parity import QUIET, assert_same_fit, caught_warnings, fit
from tests.workers import run
from tests.zoo import MODULES
from tests.zoo.carried import Chain

FIRST, LAST = 2, 3


class Count(Callback):
    """Reads and writes of the state of torch's stream in some training steps."""

    def __init__(self):
        self.found, self.counting = Counter(), False

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.counting = FIRST <= trainer.global_step < LAST

    def on_train_batch_end(self, *_):
        self.counting = False


def _states(strategy):
    count = Count()

    def counted(name):
        original = getattr(torch, name)

        def call(*args):
            count.found[name] += count.counting
            return original(*args)

        return call

    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("get_rng_state", "set_rng_state"):
            monkeypatch.setattr(torch, name, counted(name))
        flags = {"devices": 2, "max_steps": LAST, "max_epochs": 9, "limit_val_batches": 0, "callbacks": [count]}
        Trainer(**{**QUIET, **flags}, strategy=Strategy3D(**strategy, quiet=True)).fit(MODULES["GPT"]())
    return dict(+count.found)


@pytest.mark.parametrize(
    ("strategy", "times"), [({"zero_stage": 1}, 2), ({"tensor_parallel_size": 2}, 0)], ids=["data", "tensor"]
)
def test_states_are_read_and_written_once_around_a_step(strategy, times):
    wanted = {"get_rng_state": times * (LAST - FIRST), "set_rng_state": times * (LAST - FIRST)} if times else {}
    assert run(_states, strategy, world=2) == [wanted, wanted]


def test_data_ranks_draw_otherwise_in_a_step_and_their_tensor_ranks_alike():
    layout, drawn = Layout(data_parallel_size=2, tensor_parallel_size=2), []
    for rank in range(4):
        with StepRandom(layout, layout.coordinate(rank)).step():
            drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]


class Drops(Chain):
    """A block leaves itself out at random, and the module seeds by the rank: at the start of fit, or of each batch."""

    each = False

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))

        def forward(self, x):
            return x if self.training and torch.rand(()) < 0.5 else x + self.inner(x)

    def __init__(self):
        super().__init__()
        self.blocks[1], self.blocks[2], self.blocks[3] = self.Block(), self.Block(), self.Block()

    def on_fit_start(self):
        torch.manual_seed(100 + self.trainer.global_rank)

    def on_train_batch_start(self, batch, batch_idx):
        torch.manual_seed(100 + self.trainer.global_rank + batch_idx) if self.each else None


def _dropping(each):
    torch.manual_seed(1)
    module = Drops()
    module.each = each
    return module, module.batches(6)


def _fit_and_said(each, strategy):
    with caught_warnings() as said:
        got = fit(partial(_dropping, each), strategy)
    return {**got, "said": sum("the ranks of data rank 0" in text for text in said)}


@pytest.mark.parametrize("each", [False, True])
def test_tensor_ranks_that_seed_by_their_rank_draw_as_the_first_one_does(each):
    """The one that leaves out a block let the other wait for it, up to the timeout."""
    (wanted,) = run(_fit_and_said, each, None, world=1)
    ranks = run(_fit_and_said, each, {"tensor_parallel_size": 2, "timeout": 20}, world=2)
    assert [got["said"] for got in ranks] == [1, 0]
    for got in ranks:
        assert_same_fit(got, wanted)


class Lone(Callback):
    """Draws on one rank alone, after the first batches or in a validation."""

    def __init__(self, when):
        self.when = when

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.is_global_zero and (self.when, batch_idx) == ("batch", 2):
            torch.rand(1)

    def on_validation_end(self, trainer, module):
        if trainer.is_global_zero and (self.when, trainer.global_step) == ("validation", 3):
            torch.rand(1)


def _drawn_last(when):
    flags = {"validate": True, "num_sanity_val_steps": 0, "callbacks": [Lone(when)]}
    with caught_warnings() as said:
        fit(lambda: (Chain(), Chain().batches(6)), {"tensor_parallel_size": 2}, **flags)
    return float(torch.rand(())), sum("the ranks of data rank 0" in text for text in said)


@pytest.mark.parametrize("when", ["batch", "validation"])
def test_tensor_ranks_of_which_one_draws_later_are_brought_together(when):
    (first, said), (second, nothing) = run(_drawn_last, when, world=2)
    assert first == second and (said, nothing) == (1, 0)
