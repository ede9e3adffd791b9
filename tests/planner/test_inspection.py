"""The profile of a user's module, as it runs; also with frozen weights in fewer bits, and with experts."""

import pytest
import torch
from torch import nn

from lightning_3d.errors import PlannerError
from lightning_3d.layout import Layout
from lightning_3d.tools.planner.job import Job
from lightning_3d.tools.planner.memory import block_bytes, gathered_bytes
from lightning_3d.tools.planner.profile_module import CostTrace, count_module, measured_profile, profile_module, traced
from lightning_3d.tools.planner.transformer import Transformer
from tests.dryrun.compare import dry
from tests.zoo.planned import Classifier, TinyGPT

HERE = "tests.zoo.planned"


def test_a_measured_gpt_is_the_closed_form():
    measured = profile_module(f"{HERE}.TinyGPT", ["layers=3"], precision="32", tokens=None, inputs="2x17:int64")
    shape = Transformer(layers=3, hidden=32, heads=4, vocabulary=64, sequence=16, positions=16, dropout=False).profile(
        precision="32"
    )
    assert measured.parameters == shape.parameters == sum(p.numel() for p in TinyGPT().parameters())
    assert (measured.layers, measured.first_parameters, measured.tied_parameters) == (
        3,
        shape.first_parameters,
        shape.tied_parameters,
    )
    assert measured.block_flops == shape.block_flops
    assert measured.last_flops == shape.last_flops
    assert measured.attention_flops == shape.attention_flops
    assert measured.key_elements == shape.key_elements
    assert measured.boundary_elements == shape.boundary_elements
    kept = [p.whole_bytes + p.split_bytes + p.attention_bytes for p in (measured, shape)]
    assert kept[0] == pytest.approx(kept[1], rel=0.02)
    assert measured.tensor_divides == (4,)


def test_measured_activations_are_those_of_a_real_run():
    """The bytes that autograd really keeps for one sample, parameters left out, counted on real tensors."""
    measured = profile_module(f"{HERE}.TinyGPT", [], precision="32", tokens=None, inputs="2x17:int64")
    module, seen = TinyGPT(), {}
    owned = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), pytest.warns(UserWarning, match="log"):
        module.training_step(torch.zeros(2, 17, dtype=torch.int64), 0)
    real = sum(size for key, (size, _) in seen.items() if key not in owned)
    predicted = 2 * (
        measured.layers * (measured.whole_bytes + measured.split_bytes + measured.attention_bytes)
        + measured.first_bytes
        + measured.last_bytes
    )
    assert predicted == pytest.approx(real, rel=0.1)


def test_a_module_without_blocks_is_one_block():
    profile = profile_module(f"{HERE}.Classifier", [], precision="32", tokens=None, inputs=None)
    assert (profile.layers, profile.tensor_splits, profile.tokens) == (1, False, 1)
    assert profile.parameters == sum(p.numel() for p in Classifier().parameters())
    assert profile.block_flops == 2 * 64 * 27 * 5 + 2 * 320 * 10


def test_counting_needs_no_run():
    profile = count_module(nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), name="mlp")
    assert (profile.layers, profile.block_parameters, profile.first_parameters) == (4, 72, 0)
    assert not profile.can_split(2)


def test_what_runs_after_the_blocks_is_counted_there_wherever_it_is_declared():
    profile = profile_module(f"{HERE}.HeadFirst", [], precision="32", tokens=None, inputs="4x4:float32")
    assert (profile.first_parameters, profile.last_parameters) == (5 * 8, 9 * 2)


def test_a_dry_run_builds_modules_whose_initializers_read_values():
    (report,) = dry(f"{HERE}:HeadFirst", "1x1xcpu", {}).ranks
    assert (report.error, report.parameters) == (None, 4 * (5 * 8 + 4 * 72 + 9 * 2))


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
