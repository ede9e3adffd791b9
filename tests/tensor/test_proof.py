"""A proof that cannot fail proves nothing: each thing that a plan says is left out in turn."""

import warnings
from dataclasses import replace

import pytest
import torch

from lightning_3d.tensor.geometry import TensorSplit
from lightning_3d.tensor.plan_block import Study, find_plan, with_sequence
from lightning_3d.tensor.proof import Prover, Refused
from lightning_3d.tensor.sample import Sample, shortened
from lightning_3d.tensor.scratch import scratch_copy
from tests.zoo import blocks, odd_attention


def known(module, size=2):
    call = Sample((torch.randn(2, 8, 16),), {})
    samples = [cut.random(torch.Generator().manual_seed(n)) for n, cut in enumerate(shortened(call)[:2])]
    return Study(lambda seed: scratch_copy(module, seed), scratch_copy(module, 0, opened=False), samples, size)


@pytest.fixture(scope="module")
def block():
    return known(blocks.Block(blocks.FusedAttention()))


def without(names, *left_out):
    return tuple(name for name in names if name not in left_out)


def test_gradients_of_a_whole_run_are_not_zero(block):
    _, _, whole = block.prover.cases[0]
    assert min(grad.abs().max() for grad in whole.input_grads.values()) > 0.1
    assert len(whole.parameter_grads) == len(dict(block.scratch.named_parameters()))


def test_simulated_ranks_leave_the_filters_of_warnings_alone(block):
    before = list(warnings.filters)
    find_plan(block, {}, must=False)
    assert warnings.filters == before


def test_a_missing_copy_is_seen_in_the_gradient(block):
    plan, _ = find_plan(block, {}, must=False)
    with pytest.raises(Refused, match="gradient of input 0"):
        block.prover.prove(replace(plan, copies=without(plan.copies, "mlp.0")))


def test_a_missing_reduce_is_seen_in_the_output(block):
    plan, _ = find_plan(block, {}, must=False)
    with pytest.raises(Refused, match="output 0 on tensor rank 0 is off by"):
        block.prover.prove(replace(plan, reduces=without(plan.reduces, "mlp.2")))


def test_a_bias_that_every_rank_adds_is_seen(block):
    plan, _ = find_plan(block, {}, must=False)
    with pytest.raises(Refused, match="output 0"):
        block.prover.prove(replace(plan, shared=without(plan.shared, "mlp.2.bias")))


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
