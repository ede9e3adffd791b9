"""Mixtures that their authors wrote, with a list of experts and a loop, train over data ranks as on one device."""

import pytest
import torch
from torch import nn

from lightning_3d.errors import UnsupportedError
from lightning_3d.experts.prove_experts import plan_experts
from tests.experts.test_data_ranks import TWO, assert_same
from tests.experts.trained import ListedBlock
from tests.zoo.registry import members


@pytest.mark.parametrize("kind", ["Listed", "Soft", "Unreached"])
def test_two_ranks(kind):
    assert_same(kind, 2, **TWO, zero_stage=0)


@pytest.mark.parametrize(
    ("world", "strategy"),
    [(4, {"zero_stage": 0}), (4, {"zero_stage": 3, "verify": "replicas"}), (4, {"expert_parallel_size": 4})],
    ids=["replicas", "zero3", "four"],
)
def test_replicas(world, strategy):
    assert_same("Listed", world, **{**TWO, "zero_stage": 1, **strategy})


class Counting(ListedBlock):
    """Notes its calls, and would note each twice."""

    def __init__(self, *args):
        super().__init__(*args)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Summing(ListedBlock):
    """Puts another buffer in the place of its own, with what was there before."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("load", torch.zeros(()))

    def forward(self, x):
        self.load = self.load + x.detach().sum()
        return super().forward(x)


class Hooked(ListedBlock):
    """A hook keeps what the router gives."""

    def __init__(self, *args):
        super().__init__(*args)
        self.router.register_forward_hook(lambda *_: None)


class Chained(ListedBlock):
    """Each expert gets the result of the one before."""

    def forward(self, x):
        for number, expert in enumerate(self.experts):
            x = x + self.router(x).softmax(-1)[..., number, None] * expert(x)
        return x


@pytest.mark.parametrize(
    ("block", "says"),
    [
        (Counting(8, 4), "its forward changes calls"),
        (Summing(8, 4), "its forward changes load"),
        (Hooked(8, 4), "it has a forward hook"),
        (Chained(8, 4), "its results on several ranks are other ones"),
        (members("odd_blocks")["TopTwo"].build(), "calls parts of an expert"),
        (members("odd_blocks")["StackedExperts"].build(), "products over all experts"),
    ],
    ids=["counting", "summing", "hooked", "chained", "parts", "stacked"],
)
def test_what_ranks_would_compute_otherwise_is_refused(block, says):
    with pytest.raises(UnsupportedError, match=says):
        plan_experts(nn.Sequential(block), 2)


def test_a_mixture_beside_one_that_is_divided_is_named():
    with pytest.warns(
        UserWarning, match=r"The experts of 1\.experts stay on every data rank: its forward changes calls"
    ):
        plan = plan_experts(nn.Sequential(ListedBlock(8, 4), Counting(8, 4)), 2)
    assert list(plan.modules) == ["0"]
    assert torch.tensor([split.local_size(1) for split in plan.splits.values()]).sum() == 2 * (12 + 12 + 8 + 8)
