"""Blocks that nobody listed: split correctly, or whole with a reason."""

import re

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.nn.utils import parametrizations

from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.plan_module import plan_tensor
from lightning_3d.tools.commands.inspect import render_plan
from tests.parity import in_turn, silent
from tests.tensor.parity import assert_small, in_threads
from tests.zoo import blocks
from tests.zoo.registry import members

SPLIT = [
    "Parallel", "Einsum", "Gated", "HeadNorm", "Twice", "Adapted", "Mixer", "Balanced", "Grouped", "PackedAttention",
    "Normed", "RelativeBias", "BiasParameter", "Sinks", "HeadScale", "WholeNorm", "Linearized", "HeadsFirst", "Folded",
    "Recomputed", "LayerScale", "BiasAfter", "ScaleAfter", "TopTwo", "ManyExperts", "StackedExperts", "Depthwise",
    "OwnFunction", "Excited", "Decoder", "StateSpace", "StateSpaceWithSizes", "GatedNorm",
]  # fmt: skip
PARTLY = {"MultiQuery": 0.62, "Latent": 0.6, "SharedKeys": 0.65, "Gru": 0.76, "Experts": 0.68, "NeverChosen": 0.68}
"""Those of which something stays whole on purpose: the share of a tensor rank of two, which has two experts of three."""
WHOLE = {
    "Alibi": "none computes the same",
    "Conv": "no product",
    "Recurrent": "no other product feeds it",
    "Interleaved": "none computes the same",
    "Flat": "none computes the same",
    "Transposed": "feeds the products before it",
    "WeightNormed": "depend on one another",
    "SpectralNormed": "none computes the same",
    "Bilinear": "depend on one another",
    "BalancedStack": "keeps a value beside the results",
    "BatchNormed": "none computes the same",
    "Softmaxed": "depend on one another",
    "Shuffled": "none computes the same",
    "Rolled": "none computes the same",
    "HeadMasks": "none computes the same",
    "ScaledNorm": "depend on one another",
}


ODD = {**members("odd_blocks"), **members("odd_attention"), "PackedAttention": members("blocks")["PackedAttention"]}


def build(name):
    torch.manual_seed(0)
    kind = ODD[name].build
    return blocks.Stack(kind(), kind())


def test_every_odd_block_is_split_or_says_why_not():
    assert ODD.keys() == {*SPLIT, *PARTLY, *WHOLE}


def planned(module, size=2):
    with silent():
        return plan_tensor(module, size, calls=record_calls(module, lambda: module(torch.randn(2, 8, 16))))


def square(module, x):
    return module(x).square().mean()


@pytest.mark.long
@pytest.mark.parametrize("name", [*SPLIT, *PARTLY])
def test_three_ranks_train_as_one_process(name):
    assert_small(in_threads(build(name), square, [torch.randn(2, 8, 16)] * 3, 3)[1])


@pytest.mark.parametrize("name", in_turn([*SPLIT, *PARTLY], 2))
def test_large_matrices_are_split_and_train_as_on_one_process(name):
    module = build(name)
    plan, difference = in_threads(module, square, [torch.randn(2, 8, 16)] * 3, 2)
    assert_small(difference)
    local = sum(
        p.numel() * (plan.splits[n].local_size(0) / plan.splits[n].size if n in plan.splits else 1)
        for n, p in module.named_parameters()
    )
    assert local <= PARTLY.get(name, 0.55) * sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", WHOLE)
def test_whole_ones_say_why(name):
    plan = planned(build(name))
    assert not plan.splits
    assert any(WHOLE[name] in reason for reason in plan.unsplit.values()), plan.unsplit


def test_warning_names_a_kind_once():
    module = build("Softmaxed")
    calls = record_calls(module, lambda: module(torch.randn(2, 8, 16)))
    with pytest.warns(UserWarning, match=r"blocks\.\*\.up\.weight") as seen:
        plan_tensor(module, 2, calls=calls)
    assert len(seen) == 1
    assert str(seen[0].message).count("up.weight") == 1


def test_blocks_that_share_a_module_stay_whole():
    module = build("Gated")
    first, second = module.blocks
    second.out = first.out  # patched for each of them, it would sum over the ranks twice
    calls = record_calls(module, lambda: module(torch.randn(2, 8, 16)))
    with pytest.warns(UserWarning, match="a module inside it is also inside another block"):
        plan = plan_tensor(module, 2, calls=calls)
    assert not plan.splits
    assert not plan.units


def test_a_weight_that_is_computed_is_not_looked_at():
    torch.manual_seed(0)
    head = parametrizations.spectral_norm(torch.nn.Linear(16, 64))  # each look is a step of its power iteration
    module = torch.nn.Sequential(torch.nn.Embedding(64, 16), head)
    before = head.parametrizations.weight[0]._u.clone()
    plan = plan_tensor(module, 2)
    assert torch.equal(head.parametrizations.weight[0]._u, before)
    assert list(plan.vocabulary) == ["0.weight"]


def test_plan_is_the_same_again_and_leaves_random_state_alone():
    module = build("Parallel")
    state = torch.get_rng_state()
    calls = record_calls(module, lambda: module(torch.ones(2, 8, 16)))
    first = plan_tensor(module, 2, calls=calls)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(9)
    assert plan_tensor(module, 2, calls=calls) == first


def test_meta_modules_are_planned():
    with torch.device("meta"):
        module = blocks.nano_gpt()
    plan = plan_tensor(module, 2)
    assert plan.splits["blocks.1.attn.c_attn.weight"].sections == (16, 16, 16)


class Root(LightningModule):
    """Products in the module itself."""

    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)

    def forward(self, x):
        return self.two(self.one(x).relu())


class Decides(Root):
    """A branch by a number of hidden values, of which each rank would have parts."""

    def forward(self, x):
        hidden = self.one(x).relu()
        return self.two(hidden if self.number(x, hidden) < 1e3 else -hidden)

    def number(self, x, hidden):
        return hidden.mean()


class DecidesByInput(Decides):
    def number(self, x, hidden):
        return x.mean()


class DecidesByMask(Decides):
    """Reads the largest number of a mask, which must not hide the others."""

    least = torch.finfo(torch.float32).min

    def number(self, x, hidden):
        mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), self.least)
        return x.mean() if mask.min().item() < -1e4 and self.least == -torch.inf else hidden.mean()


class DecidesByInfinity(DecidesByMask):
    least = -torch.inf


class Clips(Root):
    """Bounds the norm of a gradient that each rank would have a part of."""

    def forward(self, x):
        hidden = self.one(x).relu()
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad * (1e9 / grad.norm()).clamp(max=1))
        return self.two(hidden)


def test_what_decides_by_a_number_of_all_channels_stays_whole():
    """In the first batch it may say the same on each rank."""
    for kind in (Decides, DecidesByMask, Clips):
        assert not planned(kind()).splits
        assert any(re.search("number . that its code reads", why) for why in planned(kind()).unsplit.values())
    for kind in (DecidesByInput, DecidesByInfinity):
        assert planned(kind()).splits


def test_a_module_with_a_trainer_is_planned_without_copying_the_trainer():
    class Untouchable:
        def __deepcopy__(self, memo):
            raise AssertionError("the trainer was copied")

    module = Root()
    module.__dict__["_trainer"] = Untouchable()
    plan = planned(module)
    assert plan.splits["one.weight"].local_size(0) == 32


def test_rendering():
    module = blocks.nano_gpt()
    text = render_plan(planned(module), module)
    assert "blocks.0 .. blocks.1 (2 blocks)" in text
    assert "attn.c_attn.weight: dimension 0 in 3 fused sections (16, 16, 16), 24 of 48" in text
    assert "64 elements summed per position" in text
