"""Frozen weights in fewer bits, and experts, in the plan of a user's module."""

import pytest
import torch
from torch import nn

from lightning_3d.errors import PlannerError
from lightning_3d.layout import Layout
from lightning_3d.tools.planner.job import Job
from lightning_3d.tools.planner.memory import block_bytes, gathered_bytes
from lightning_3d.tools.planner.profile_module import CostTrace, count_module, measured_profile, traced


class Experts(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, 8, 8))

    def forward(self, hidden, top_k_index, top_k_weights):
        return torch.einsum("ti,tkij,tk->tj", hidden, self.up[top_k_index], top_k_weights)


class Block(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.gate, self.inner, self.experts = nn.Linear(8, count), nn.Linear(8, 8, bias=False), Experts(count)

    def forward(self, hidden):
        weights, index = self.gate(hidden).softmax(-1).topk(2)
        return self.inner(hidden) + self.experts(hidden, index, weights)


class Mixture(nn.Module):
    """Blocks with experts. Of each, one bias is trained."""

    def __init__(self, *counts):
        super().__init__()
        self.blocks = nn.Sequential(*[Block(count) for count in counts])
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))

    def forward(self, hidden):
        return self.blocks(hidden)


def test_frozen_experts_have_the_bits_of_their_block():
    profile = count_module(Mixture(4, 4), name="mixture", frozen_bits=4)
    assert profile.expert_parameters == 4 * 64 / 8
    assert profile.block_parameters == (4 * 64 + 64 + 32) / 8 + 4


@pytest.mark.parametrize("bits", [None, 4])
def test_mixed_precision_does_not_halve_frozen_bits(bits):
    profile = count_module(Mixture(4, 4), name="mixture", precision="bf16-mixed", frozen_bits=bits)
    job, layout = (
        Job(profile=profile, samples=8, batch=8, precision="bf16-mixed"),
        Layout(data_parallel_size=2, zero_stage=3),
    )
    products, experts = (64 + 32, 4 * 64) if bits is None else ((64 + 32) / 8, 4 * 64 / 8)
    block = (4 if bits else 2) * products + 2 * 4 + 4 * experts
    assert block_bytes(job, layout) == block
    assert gathered_bytes(job, layout, 0) == 2 * block


def test_frozen_bits_of_a_module_without_blocks_are_refused():
    with pytest.raises(PlannerError, match="--frozen-bits counts weights in blocks, and one has no equal blocks"):
        count_module(nn.Linear(8, 8), name="one", frozen_bits=4)


def test_experts_and_what_a_token_goes_through_are_measured():
    module, trace = Mixture(4, 8), CostTrace(samples=3)
    with traced(module, trace):
        module(torch.randn(3, 8)).sum().backward()
    profile = measured_profile(module, trace, name="mixture")
    assert (profile.experts, profile.expert_count) == (4, 6)
    assert profile.active_share == (2 / 4 + 2 / 8) / 2
