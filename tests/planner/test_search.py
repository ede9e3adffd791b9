import itertools
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_3d.layout import Layout
from lightning_3d.tools.planner.advice import explain_misfit
from lightning_3d.tools.planner.catalogue import Catalogue
from lightning_3d.tools.planner.hardware import Cluster
from lightning_3d.tools.planner.job import Job, usual_batch
from lightning_3d.tools.planner.known_models import named_model
from lightning_3d.tools.planner.memory import rank_memory, rank_parameters, rank_trained, states_in_step
from lightning_3d.tools.planner.priced_layout import price_layout
from lightning_3d.tools.planner.search import ANYTHING, Pins, _order, can_fit, even_chunks, families, fitting, leaders
from lightning_3d.tools.planner.step_time import link_rate

CATALOGUE = Catalogue.load()


def job(name, devices, **changes):
    profile = named_model(name).profile(precision=changes.get("precision", "bf16-mixed"))
    return Job(**{"profile": profile, "samples": 1e6, "batch": usual_batch(profile, devices), **changes})


def search(asked, where, pins=ANYTHING):
    """Every plan that fits, fastest first; among equals the simplest: what `leaders` finds without pricing all."""
    for offload in ("none", "all") if pins.offload is None else (pins.offload,):
        plans = [plan for one in families(asked, where, pins) for plan in fitting(asked, where, one, pins, offload)]
        if plans:
            return sorted(plans, key=_order)
    return []


@pytest.mark.parametrize(
    ("model", "cluster"), [("gpt2", "8xa100"), ("llama-7b", "2x8xh100"), ("llama-70b", "16x8xh100"), ("13b", "6xa100")]
)
def test_every_plan_uses_all_devices_divides_and_fits(model, cluster):
    where = CATALOGUE.cluster(cluster)
    asked = job(model, where.devices)
    plans = search(asked, where)
    assert plans
    for plan in plans:
        layout = plan.layout
        assert layout.world_size == where.devices
        assert layout.data_parallel_size * plan.micro * plan.microbatches == asked.batch
        assert asked.profile.can_split(layout.tensor_parallel_size)
        assert layout.tensor_parallel_size <= where.devices_per_node
        assert plan.fits
        assert plan.peak.total <= where.accelerator.memory_gb * 1e9
        assert 0 < plan.mfu <= plan.hfu < 1
    assert [plan.time.total for plan in plans] == sorted(plan.time.total for plan in plans)
    of_size = {}
    for plan in plans:
        of_size.setdefault((plan.layout.tensor_parallel_size, plan.layout.pipeline_parallel_size), plan)
    for most in (1, 3, len(of_size)):
        assert leaders(asked, where, most=most) == list(of_size.values())[:most]


def test_no_layout_that_fits_is_faster_than_the_best():
    """The search skips members that a faster one makes needless: hold it to trying every one of them."""
    where = CATALOGUE.cluster("2x8xa100-40g")
    asked = job("llama-7b", where.devices)
    best = search(asked, where)[0]
    everything = (
        price_layout(
            asked,
            where,
            Layout(**{**vars(family.layout), "zero_stage": stage, "recompute": recompute}),
            micro=family.micro,
        )
        for family in families(asked, where, ANYTHING)
        for stage in (0, 1, 2, 3)
        for recompute in ("none", "selective", "full")
    )
    assert best.time.total == min(plan.time.total for plan in everything if plan.fits)


@pytest.mark.parametrize("model", ["llama-7b", "gpt3-175b"])
@pytest.mark.parametrize(
    "pins", [ANYTHING, Pins(offload="none"), Pins(schedule="gpipe"), Pins(recompute="none", zero=1)]
)
def test_what_can_fit_is_found_and_nothing_else(model, pins):
    sizes = (1, 4, 24)
    found = {}
    for devices, accelerator in itertools.product(sizes, ("k80", "a100-40g", "h200")):
        where = Cluster.of(CATALOGUE.cluster(f"1x{accelerator}").accelerator, devices)
        asked = job(model, devices, batch=48)
        found[devices, accelerator] = bool(search(asked, where, pins))
        assert can_fit(asked, where, pins) == found[devices, accelerator]
    assert len(set(found.values())) == 2


def test_ten_thousand_devices_in_two_seconds():
    where = CATALOGUE.cluster("1250x8xh100")
    asked = job("gpt3-175b", where.devices, batch=10000)
    start = time.process_time()
    assert leaders(asked, where)
    assert time.process_time() - start < 2


def test_pins_hold():
    where = CATALOGUE.cluster("2x8xh100")
    pins = Pins(tensor=2, pipeline=4, zero=1, schedule="interleaved_1f1b", stages_per_rank=2, micro=1, recompute="full")
    for plan in search(job("llama-7b", 16), where, pins):
        layout = plan.layout
        assert (layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.zero_stage) == (2, 4, 1)
        assert (layout.schedule, layout.stages_per_rank, plan.micro) == ("interleaved_1f1b", 2, 1)
        assert layout.recompute == "full"


# Narayanan et al. 2021, table 1: model, tensor, pipeline, GPUs, batch, measured TFLOP/s per GPU (full recompute).
MEGATRON = [
    ("megatron-1.7b", 1, 1, 32, 512, 137),
    ("megatron-3.6b", 2, 1, 64, 512, 138),
    ("megatron-7.5b", 4, 1, 128, 512, 142),
    ("megatron-18b", 8, 1, 256, 1024, 135),
    ("megatron-39b", 8, 2, 512, 1536, 138),
    ("megatron-76b", 8, 4, 1024, 1792, 140),
    ("megatron-145b", 8, 8, 1536, 2304, 148),
    ("megatron-310b", 8, 16, 1920, 2160, 155),
    ("megatron-530b", 8, 35, 2520, 2520, 163),
    ("megatron-1t", 8, 64, 3072, 3072, 163),
]


@pytest.mark.parametrize(("model", "tensor", "pipeline", "devices", "batch", "tflops"), MEGATRON)
def test_estimated_speed_is_within_15_percent_of_measured(model, tensor, pipeline, devices, batch, tflops):
    profile = named_model(model).profile(precision="16-true", attention="eager")  # Megatron sends 16 bits
    asked = Job(profile=profile, samples=batch, batch=batch, precision="16-true")
    where = Cluster.of(CATALOGUE.find("a100-80g"), devices)
    pins = Pins(tensor=tensor, pipeline=pipeline, sequence_parallel=False)
    plans = [
        price_layout(asked, where, replace(family.layout, recompute="full"), micro=family.micro)
        for family in families(asked, where, pins)
        if family.layout.schedule in ("1f1b", "interleaved_1f1b")
    ]
    assert 312 * max(plan.hfu for plan in plans) == pytest.approx(tflops, rel=0.15)


@pytest.mark.parametrize(
    ("sizes", "microbatches", "expected"),
    [
        ({"data_parallel_size": 8, "zero_stage": 0}, 1, (1, 1, 1)),
        ({"data_parallel_size": 8, "zero_stage": 1}, 1, (9 / 8, 1 / 8, 1 / 8)),
        ({"data_parallel_size": 8, "zero_stage": 1}, 4, (9 / 8, 1, 1 / 8)),
        ({"data_parallel_size": 8, "zero_stage": 2}, 4, (9 / 8, 1 / 8, 1 / 8)),
        ({"data_parallel_size": 8, "zero_stage": 3}, 4, (1 / 8, 1 / 8, 1 / 8)),
        *(
            ({"data_parallel_size": 4, "pipeline_parallel_size": 2, "zero_stage": stage}, 8, (5 / 4, 1, 1 / 4))
            for stage in (1, 2, 3)
        ),
        ({"data_parallel_size": 1, "zero_stage": 3}, 1, (1, 1, 1)),
    ],
)
def test_states_in_a_step(sizes, microbatches, expected):
    """As FSDP2 has them: gathered weights and their shards, gradients reduced block by block or accumulated."""
    asked, layout = job("llama-7b", 8, precision="32"), Layout(**sizes)
    parameters = rank_parameters(asked.profile, layout, 0)
    whole = asked.per_parameter.of(parameters)

    states = states_in_step(asked, layout, 0, microbatches)
    shares = [getattr(states, name) / getattr(whole, name) for name in ("weights", "gradients", "optimizer")]
    assert shares == pytest.approx(expected)
    peak = rank_memory(asked, layout, stage=0, micro=1, microbatches=microbatches, reserved=0.0)
    assert peak.total >= (expected[0] + expected[2]) * min(whole.weights, whole.optimizer)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(["none", "selective", "full"]),
)
def test_parameters_of_all_ranks_add_up(tensor, pipeline, stage, recompute):
    layout = Layout(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, zero_stage=stage, recompute=recompute)
    profile = named_model("llama-7b").profile()
    total = sum(rank_parameters(profile, layout, rank) for rank in range(pipeline))
    whole = profile.layers * profile.whole_parameters + profile.last_whole
    assert total == pytest.approx((profile.parameters - whole) / tensor + whole)


def test_links():
    where = CATALOGUE.cluster("4x8xh100")
    node, cluster = 0.8 * 450e9, 0.8 * 50e9
    assert link_rate(where, span=8, stride=1) == node
    assert link_rate(where, span=32, stride=1) == min(node, 8 * cluster)
    assert link_rate(where, span=4, stride=8) == cluster
    assert link_rate(where, span=16, stride=2) == 4 * cluster


def test_a_misfit_is_explained_in_one_line():
    where = CATALOGUE.cluster("4xa100-40g")
    text = explain_misfit(job("gpt3-175b", 4), where, ANYTHING, CATALOGUE)
    assert "\n" not in text
    assert "does not fit on 1x4xa100-40g" in text
    assert "at least" in text
    pins = Pins(tensor=3)
    assert "--tensor 3 does not divide 4 devices" in explain_misfit(job("gpt2", 4), where, pins, CATALOGUE)
    prime = CATALOGUE.cluster("13xa100-40g")
    assert "no layout of 13 devices divides" in explain_misfit(job("gpt2", 13, batch=7), prime, ANYTHING, CATALOGUE)
    odd = explain_misfit(job("gpt2", 4, batch=8), where, Pins(micro=3), CATALOGUE)
    assert "--micro 3 divides what a data rank has of a batch of 8 samples in no layout" in odd
    pins = Pins(pipeline=4, schedule="interleaved_1f1b", micro=2)
    few = explain_misfit(job("gpt2", 4, batch=6), where, pins, CATALOGUE)
    assert "interleaved_1f1b needs microbatches that are a multiple" in few
    pins = Pins(pipeline=4, schedule="dualpipev", stages_per_rank=3)
    assert "dualpipev has 2 stages on a rank" in explain_misfit(job("gpt2", 4), where, pins, CATALOGUE)
    pins = Pins(zero=0, tensor=1, pipeline=1, offload="none")
    assert "leave out the flags" in explain_misfit(job("llama-7b", 4), where, pins, CATALOGUE)


def test_a_known_rate_replaces_the_estimate():
    where = CATALOGUE.cluster("128xa100-80g")
    profile = named_model("megatron-7.5b").profile(precision="16-mixed")
    asked = Job(profile=profile, samples=512, batch=512, precision="16-mixed", sustained=142e12)
    plan = search(asked, where, Pins(tensor=4, pipeline=1, recompute="full"))[0]
    assert f"{plan.time.total:.2f}" == "3.70"


@pytest.mark.parametrize("model", ["gpt2", "llama-7b", "llama-70b", "gpt3-175b"])
@pytest.mark.parametrize("devices", [1, 3, 8, 44, 976, 1953, 10000])
def test_the_assumed_batch_divides_in_many_ways(model, devices):
    profile = named_model(model).profile()
    batch = usual_batch(profile, devices)
    odd = batch // (batch & -batch)
    assert devices % odd == 0
    assert 0.35e6 <= batch * profile.tokens <= 25e6
    assert usual_batch(profile, devices, micro=3) % 3 == 0


def test_samples_that_are_no_tokens_come_in_batches_like_the_example():
    profile = replace(named_model("gpt2").profile(), tokens=1, example_samples=6)
    assert usual_batch(profile, 8) == 48
    assert usual_batch(profile, 8, micro=4) == 96


def test_microbatches_need_not_be_powers_of_two():
    where = CATALOGUE.cluster("h100")
    asked = job("gpt2", 1, batch=3**6)
    assert search(asked, where)[0].micro in (3, 9, 27, 81)


@pytest.mark.parametrize("pins", [Pins(pipeline=4, schedule="loopedbfs"), Pins(pipeline=4, stages_per_rank=3)])
def test_what_is_offered_is_searched(pins):
    for plan in search(job("llama-7b", 8, precision="bf16-true"), CATALOGUE.cluster("8xh100"), pins):
        assert plan.layout.pipeline_parallel_size == 4
        assert pins.schedule in (None, plan.layout.schedule)
        assert pins.stages_per_rank in (None, plan.layout.stages_per_rank)
    assert plan.fits


def test_interleaved_stages_may_be_uneven():
    assert even_chunks(16, 126) == [2, 4]
    assert even_chunks(4, 32) == [2, 4, 8]
    assert even_chunks(4, 4) == []


def test_frozen_parameters_cost_weights_only():
    whole = named_model("llama-7b").profile()
    frozen = replace(
        whole,
        block_frozen=whole.block_parameters,
        first_frozen=whole.first_parameters,
        last_frozen=whole.last_parameters,
        backward_share=0,
    )
    layout = Layout(data_parallel_size=2)
    assert frozen.trained == rank_trained(frozen, layout, 0) == 0
    assert frozen.model_flops(1) == pytest.approx(whole.model_flops(1) / 3)
    held = states_in_step(replace(job("llama-7b", 2, precision="32"), profile=frozen), layout, 0, 1)
    assert (held.gradients, held.optimizer, held.weights) == (0, 0, 4 * whole.parameters * 1.5)
