"""Mixtures that their authors wrote, with a list of experts and a loop, train over data ranks as on one device."""

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.errors import UnsupportedError
from lightning_3d.experts.expert_forward import make_layers, own_shards
from lightning_3d.experts.prove_experts import plan_experts
from lightning_3d.module.forward import add_layer
from lightning_3d.module.undo import UndoStack
from lightning_3d.tensor.scratch import shard_copy
from lightning_3d.tensor.simulate import run_shards
from tests.experts.test_data_ranks import TWO, assert_same
from tests.experts.test_routed import Mixture
from tests.experts.trained import Listed, ListedBlock, ProductsBlock
from tests.parity import assert_parity, train
from tests.workers import WorkerError, run
from tests.zoo.registry import members


@pytest.mark.parametrize("kind", ["Listed", "Soft", "Unreached", "Adapted"])
def test_two_ranks(kind):
    assert_same(kind, 2, **TWO, zero_stage=0)


@pytest.mark.parametrize("strategy", [TWO, {"tensor_parallel_size": 2}], ids=["owners", "tensor"])
def test_losses_in_lists_that_all_mixtures_share_count_once(strategy):
    """Neither a plan ahead of training nor the first of two runs leaves some there."""
    assert_parity("tests.experts.trained:Global", 2, {"quiet": True, "zero_stage": 1, **strategy})


def test_the_second_run_draws_the_numbers_of_the_first():
    assert_parity("tests.experts.trained:Drawing", 2, {"quiet": True, **TWO, "zero_stage": 1})


@pytest.mark.parametrize(
    ("world", "strategy"),
    [(4, {"zero_stage": 0}), (4, {"zero_stage": 3, "verify": "replicas"}), (4, {"expert_parallel_size": 4})],
    ids=["replicas", "zero3", "four"],
)
def test_replicas(world, strategy):
    assert_same("Listed", world, **{**TWO, "zero_stage": 1, **strategy})


class Meter:
    """An object of the user's, with an array."""

    def __init__(self):
        self.calls, self.rows = 0, np.zeros(1)


class Counting(ListedBlock):
    """Counts calls in attributes, buffers, containers and an object; in place and by other objects."""

    def __init__(self, *args):
        super().__init__(*args)
        self.calls, self.last, self.table = 0, torch.zeros(()), torch.zeros(1_500_000)
        self.register_buffer("load", torch.zeros(()))
        self.register_buffer("sum", torch.zeros(()))
        self.noted, self._tally, self.meter = [], {"train": [0], "load": torch.zeros(())}, Meter()

    def forward(self, x):
        self.calls += 1
        self.last += 1
        self.table += 1
        self.load = self.load + 1
        self.sum.add_(1)
        self.noted.append(len(x))
        self._tally["train"][0] += 1
        self._tally["load"] = self._tally["load"] + 1
        self.meter.calls += 1
        self.meter.rows[0] += 1
        return super().forward(x)

    def counts(self):
        tally, meter = self._tally, self.meter
        mine = (self.calls, self.last, self.table[0], self.load, self.sum)
        others = (tally["train"][0], tally["load"], meter.calls, meter.rows[0])
        return *map(float, mine + others), len(self.noted)


class Hooked(ListedBlock):
    def __init__(self, *args):
        super().__init__(*args)
        self.router.register_forward_hook(lambda *_: None)


class Chained(ListedBlock):
    """Each expert gets the result of the one before."""

    def forward(self, x):
        for number, expert in enumerate(self.experts):
            x = x + self.router(x).softmax(-1)[..., number, None] * expert(x)
        return x


class Held(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.up, self.router = nn.Parameter(torch.randn(count, width, width)), nn.Linear(width, count)


class Holding(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        self.experts = Held(width, count)

    def forward(self, x):
        return torch.einsum("btw,ewi,bte->bti", x, self.experts.up, self.experts.router(x).softmax(-1))


class HeldForward(Held):
    """Experts with a forward of its own, which other code does not use."""

    def forward(self, x):
        return torch.einsum("btw,ewi,bte->bti", x, self.up, self.router(x).softmax(-1))


class Reading(Holding):
    """The experts are multiplied by a method."""

    def __init__(self, width, count):
        super().__init__(width, count)
        self.experts = HeldForward(width, count)

    def forward(self, x):
        return self.mixed(x)

    def mixed(self, x):
        return super().forward(x)


class HoldingForward(Reading):
    forward = Holding.forward


class Adapting(nn.Module):
    """It may change a parameter of the experts by its name, as PEFT's adapters of parameters do."""

    def __init__(self, width, count):
        super().__init__()
        self.experts, self.parameter_name = HeldForward(width, count), "up"

    def forward(self, x):
        return self.experts(x)


class Checkpointed(ProductsBlock):
    """Experts compute again in backward, where each rank has its own ones only."""

    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Penalised(ProductsBlock):
    """A sum over its own parameters, of which a rank has some."""

    def forward(self, x):
        return super().forward(x)[0] + sum(each.square().sum() for each in self.parameters())


class Both(ProductsBlock):
    def __init__(self, width, count):
        super().__init__(width, count)
        self.both = [self.up, self.down]

    def forward(self, x):
        up, down = self.both
        return torch.einsum("btw,ewi,eio,bte->bto", x, up, down, self.gates(self.router(x)))


class Remembering(ProductsBlock):
    """Results depend on a call before, as one device has it on each rank's tokens."""

    def __init__(self, width, count):
        super().__init__(width, count)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.mean = self.mean * 0.5 + x.detach().mean()
        return super().forward(x)[0] + self.mean


class Masked(ProductsBlock):
    def forward(self, x, mask):
        return super().forward(x * mask)


def sharing():
    """Two mixtures with one list. Rows of one traveled, and the other met an error about its first call."""
    both = nn.Sequential(ListedBlock(8, 4), ListedBlock(8, 4))
    both[1].experts = both[0].experts
    return both


@pytest.mark.parametrize("block", [ProductsBlock, Remembering, Masked, HeldForward])
def test_gathered_experts_are_planned(block):
    plan = plan_experts(nn.ModuleDict({"mixtures": nn.Sequential(block(8, 4))}), 2)
    assert list(plan.modules) == ["mixtures.0"]
    assert plan.line.endswith("gathered where code multiplies all at once (mixtures.*)")


def test_frozen_experts_have_no_gradient_to_sum():
    def call(axis):
        block = ProductsBlock(8, 4)
        block.up.requires_grad_(False)
        with own_shards(block, ("up", "down"), axis, gathered=True) as whole:
            return {name: (len(rows), rows.requires_grad) for name, rows in whole.items()}

    assert run_shards(2, call) == [{"up": (8, False), "down": (8, True)}] * 2


@pytest.mark.parametrize(
    ("block", "says"),
    [
        (Hooked(8, 4), "it has a forward hook"),
        (Chained(8, 4), "its results on several ranks are other ones"),
        (members("odd_blocks")["TopTwo"].build(), "calls parts of an expert"),
        (Holding(8, 4), "other code than its forward uses its parameters"),
        (HoldingForward(8, 4), "other code than its forward uses its parameters"),
        (Reading(8, 4), "other code than its forward uses its parameters"),
        (Adapting(8, 4), "a module around it changes its parameters by their names"),
        (Checkpointed(8, 4), "it does not run with 2 of its experts"),
        (Penalised(8, 4), "its results on several ranks are other ones"),
        (Both(8, 4), "it does not run with 2 of its experts"),
        (sharing(), "several mixtures share them"),
    ],
    ids=["hooked", "chained", "parts", "held", "read", "read-later", "adapting", "checkpointed", "penalised", "both",
         "sharing"],
)  # fmt: skip
def test_what_ranks_would_compute_otherwise_is_refused(block, says):
    with pytest.raises(UnsupportedError, match=says):
        plan_experts(nn.Sequential(block), 2)


def test_a_mixture_beside_one_that_is_divided_is_named():
    with pytest.warns(
        UserWarning, match=r"The experts of 1\.experts stay on every data rank: its results on several ranks"
    ):
        plan = plan_experts(nn.Sequential(ListedBlock(8, 4), Chained(8, 4)), 2)
    assert list(plan.modules) == ["0"]
    assert torch.tensor([split.local_size(1) for split in plan.splits.values()]).sum() == 2 * (12 + 12 + 8 + 8)


class Noisy(ListedBlock):
    def forward(self, x):
        return super().forward(x + 0 * torch.rand_like(x))


def test_a_plan_takes_no_draws():
    """The first rank alone makes it."""
    module, before = nn.Sequential(Noisy(8, 4)), torch.get_rng_state()
    plan_experts(module, 2)
    assert torch.get_rng_state().equal(before)


def test_a_mixture_counts_a_call_once():
    module = Counting(8, 4)
    (experts,) = plan_experts(nn.Sequential(module), 2).modules.values()

    def call(axis):
        own = shard_copy(module, lambda _, value: value)
        for layer in make_layers(own, experts, axis):
            add_layer(layer, UndoStack())
        own(torch.randn(2, 3, 8))
        return own.counts()

    assert run_shards(1, call) == [(1,) * 10]


@pytest.mark.parametrize(("block", "shape"), [(lambda: ListedBlock(8, 4), (2, 3, 8)), (Mixture, (6, 8))])
def test_rows_of_an_evaluation_are_not_counted(block, shape):
    module = nn.Sequential(block())
    ((name, experts),) = plan_experts(module, 2).modules.items()

    def call(axis):
        own = shard_copy(module, lambda _, value: value)
        mixture, *others = make_layers(own.get_submodule(name), experts, axis)
        for layer in (mixture, *others):
            add_layer(layer, UndoStack())
        own.eval()(torch.randn(shape))
        evaluated = mixture.loads
        own.train()(torch.randn(shape))
        return evaluated, int(mixture.loads.sum())

    assert run_shards(1, call) == [(0, 6 * 2)]


def test_a_mixture_is_called_twice_before_the_backward():
    assert_parity("tests.experts.trained:Twice", 2, {"expert_parallel_size": 2, "zero_stage": 0, "quiet": True})


class Orthogonal(Listed):
    """The loss reads the weights of listed experts, of which a rank has some: others have no rows there."""

    def loss(self, batch):
        weights = torch.stack([each[0].weight.flatten() for block in self.blocks for each in block.experts])
        return super().loss(batch) + 1e-2 * (weights @ weights.T).square().mean()


@pytest.mark.parametrize(
    ("world", "strategy", "says"),
    [
        (2, TWO, "training_step computes with sharded weights"),
        (4, {**TWO, "pipeline_parallel_size": 2}, r"reads 'blocks\.[01]\.experts.* outside of its block"),
    ],
    ids=["owners", "stages"],
)
def test_weights_of_experts_read_by_the_step_are_refused(world, strategy, says):
    with pytest.raises(WorkerError) as error:
        run(train, f"{__name__}:Orthogonal", world, strategy, {}, {}, world=world)
    assert len(re.findall(f"UnsupportedError: .*{says}", str(error.value))) == world
