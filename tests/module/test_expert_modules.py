"""Experts are found by signature and sizes, layers of a stack and convolutions are not experts."""

import pytest
from torch import nn

from lightning_3d.module.expert_modules import ExpertsKind, find_experts, of_expert
from tests.zoo import blocks
from tests.zoo.families import FAMILIES
from tests.zoo.registry import members

ROUTED = {"mixtral": 2, "qwen3_moe": 2, "olmoe": 2, "deepseek_v3": 2, "gpt_oss": 4}
"""Parameters by expert: matrices, and for gpt-oss a bias of each."""
LISTED = {"Experts": 3, "TopTwo": 4, "ManyExperts": 24}


@pytest.mark.parametrize("family", ROUTED)
def test_experts_that_are_called_with_routes(family):
    found = find_experts(FAMILIES[family].build())
    assert {(each.count, len(each.parameters), each.kind) for each in found} == {
        (4, ROUTED[family], ExpertsKind.ROUTED)
    }


@pytest.mark.parametrize("name", LISTED)
def test_experts_in_a_list(name):
    (found,) = find_experts(members("odd_blocks")[name].build())
    assert (found.name, found.count, found.kind) == ("experts", LISTED[name], ExpertsKind.LISTED)
    assert all(each.startswith("experts.1.") for each in of_expert(found.parameters, found.count, 1))


def test_experts_in_one_tensor():
    (found,) = find_experts(members("odd_blocks")["StackedExperts"].build())
    assert (found.name, found.count, found.parameters, found.kind) == ("", 4, ("up", "down"), ExpertsKind.STACKED)


@pytest.mark.parametrize(
    "build", [FAMILIES["mamba"].build, FAMILIES["qwen3"].build, lambda: blocks.Stack(nn.Linear(4, 4))]
)
def test_nothing_else_is_experts(build):
    assert find_experts(build()) == []
