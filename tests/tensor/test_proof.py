"""A proof that cannot fail proves nothing: each thing that a plan says is left out in turn."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_3d.tensor import proof
from lightning_3d.tensor.geometry import TensorSplit, local_part
from lightning_3d.tensor.plan_block import Study, find_plan, with_sequence
from lightning_3d.tensor.proof import Prover, Refused
from lightning_3d.tensor.sample import Sample
from lightning_3d.tensor.scratch import scratch_copy
from lightning_3d.tensor.tensor_plan import UnitPlan
from tests.zoo import blocks, odd_attention


def known(module, size=2, shapes=((2, 8, 16), (1, 5, 16))):
    samples = [
        Sample((torch.full(shape, 2.0),), {}).random(torch.Generator().manual_seed(n)) for n, shape in enumerate(shapes)
    ]
    return Study(lambda seed: scratch_copy(module, seed), scratch_copy(module, 0, opened=False), samples, size)


@pytest.fixture(scope="module")
def block():
    return known(blocks.Block(blocks.FusedAttention()))


def without(names, *left_out):
    return tuple(name for name in names if name not in left_out)


def test_gradients_of_a_whole_run_are_not_zero(block):
    _, _, whole = block.prover.cases[0]
    assert min(grad.abs().max() for grad in whole.input_grads.values()) > 0.1
    assert {name for name, _ in whole.parameter_grads} == set(dict(block.scratch.named_parameters()))
    assert min(grad.abs().max() for grad in whole.parameter_grads.values()) > 1e-9


def test_a_large_block_is_proven_by_sums(monkeypatch):
    monkeypatch.setattr(proof, "LARGE", 0)
    monkeypatch.setattr(proof.gc, "collect", lambda: None)  # seconds each in a process of many tests
    large = known(blocks.Block(blocks.FusedAttention()))
    _, _, whole = large.prover.cases[0]
    summed = {name for name, dim in whole.parameter_grads if dim is not None}
    assert summed == {name for name, parameter in large.scratch.named_parameters() if parameter.dim() > 1}
    plan, _ = find_plan(large, {}, must=False)
    assert summed == plan.splits.keys() - {"attn.c_attn.bias", "mlp.0.bias"}
    shard_copy = proof.shard_copy

    def scaled(scratch, local):
        shard = shard_copy(scratch, local)
        shard.attn.c_attn.weight.register_hook(lambda grad: 1.01 * grad)
        return shard

    monkeypatch.setattr(proof, "shard_copy", scaled)
    with pytest.raises(Refused, match=r"gradient of attn.c_attn.weight on tensor rank 0 is off by 0\.0"):
        large.prover.prove(plan)


@pytest.mark.parametrize("dim", [0, 1, 2, None])
@pytest.mark.parametrize("shape", [(4, 24, 32), (24, 4, 32), (32, 24, 3)])
def test_one_wrong_element_is_seen_in_sums(dim, shape):
    """In the shard of its rank, along whichever dimension the parameter is split."""
    parameter, right = nn.Parameter(torch.zeros(shape)), torch.randn(shape, generator=torch.Generator().manual_seed(1))
    wrong, dims = right.clone(), proof.dims_to_sum(nn.ParameterDict({"weight": parameter}), large=True)
    wrong[0, 1, 1] += 0.01 * right.abs().max()
    split = None if dim is None else TensorSplit.even(dim, shape[dim], 2)
    plan = UnitPlan(splits={} if split is None else {"weight": split})

    def sums(grad):
        found, half = {}, nn.Parameter(torch.zeros_like(grad))
        half.grad = grad.clone()
        proof.add_sums(found, "weight", dims["weight"], half)
        assert half.grad is None
        return found

    part = (lambda grad: grad) if split is None else (lambda grad: local_part(grad, split, 0))
    proof.compare_gradients(plan, 0, sums(right), sums(part(right)), 1.0)
    with pytest.raises(Refused, match="gradient of weight on tensor rank 0 is off by"):
        proof.compare_gradients(plan, 0, sums(right), sums(part(wrong)), 1.0)


def test_simulated_ranks_leave_the_filters_of_warnings_alone(block):
    before = list(warnings.filters)
    find_plan(block, {}, must=False)
    assert warnings.filters == before


MISSING = [("copies", "mlp.0", "gradient of input 0"), ("reduces", "mlp.2", "output 0 on tensor rank 0 is off by"),
           ("shared", "mlp.2.bias", "output 0")]  # fmt: skip


@pytest.mark.parametrize(("part", "name", "says"), MISSING)
def test_what_a_plan_lacks_is_seen(block, part, name, says):
    plan, _ = find_plan(block, {}, must=False)
    with pytest.raises(Refused, match=says):
        block.prover.prove(replace(plan, **{part: without(getattr(plan, part), name)}))


class Convolved(nn.Module):
    """Layers of an MLP for each pixel and a convolution, whose results the next layer gets."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"mlp": blocks.MLP(16), "mix": nn.Conv2d(16, 16, 3, padding=1)}) for _ in range(20)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["mlp"](x.movedim(1, -1)).movedim(-1, 1)
            x = x + layer["mix"](x)
        return x


def test_an_error_in_any_of_many_convolved_layers_is_seen():
    deep = known(Convolved(), shapes=[(2, 16, 8, 8)])
    plan, _ = find_plan(deep, {}, must=False)
    for number in (0, 10, 19):
        bias = next(name for name in plan.shared if name.startswith(f"layers.{number}."))
        ten_limits = r"output 0 on tensor rank 0 is off by 0\.(00[2-9]|0[1-9]|[1-9])"
        with pytest.raises(Refused, match=ten_limits):
            deep.prover.prove(replace(plan, shared=without(plan.shared, bias)))


def test_sections_in_another_order_are_seen(block):
    plan, _ = find_plan(block, {}, must=False)
    wrong = TensorSplit.even(0, 48, 2)
    splits = {**plan.splits, "attn.c_attn.weight": wrong, "attn.c_attn.bias": wrong}
    with pytest.raises(Refused):
        block.prover.prove(replace(plan, splits=splits))


def test_a_parameter_whose_gradient_is_not_summed_is_seen():
    study = known(odd_attention.HeadNorm())
    plan, _ = find_plan(study, {}, must=False)
    assert plan.summed == ("norm.weight",)
    with pytest.raises(Refused, match=r"gradient of norm\.weight"):
        study.prover.prove(replace(plan, summed=()))


def test_norms_of_a_divided_sequence_that_are_not_summed_are_seen(block):
    plan, _ = find_plan(block, {}, must=False)
    divided = with_sequence(block, plan)
    outer = without(divided.sequence.outer, "ln_1.weight")
    with pytest.raises(Refused, match=r"gradient of ln_1\.weight"):
        block.prover.prove(replace(divided, sequence=replace(divided.sequence, outer=outer)))


def test_what_is_not_a_number_is_refused():
    class Broken(blocks.MLP):
        def forward(self, x):
            return super().forward(x) / torch.zeros(())

    study = known(Broken())
    plan, why = find_plan(study, {}, must=False)
    assert plan is None
    assert "none computes the same" in next(iter(why.values()))
    assert isinstance(study.prover, Prover)
