"""Choices besides a layout: experts, partial recompute, compression, hybrid shards, offload of one kind, fp8, context."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_3d import Strategy3D
from lightning_3d.cli import main
from lightning_3d.errors import PlannerError
from lightning_3d.layout import Layout
from lightning_3d.tools.planner.catalogue import Catalogue
from lightning_3d.tools.planner.job import Job, Options
from lightning_3d.tools.planner.known_models import named_model
from lightning_3d.tools.planner.priced_layout import price_layout
from lightning_3d.tools.planner.search import Pins, leaders
from lightning_3d.tools.planner.wire_bytes import powersgd_elements

CATALOGUE = Catalogue.load()


def job(name="llama-7b", batch=64, **options):
    profile = named_model(name).profile(precision="bf16-mixed")
    return Job(profile=profile, samples=1e6, batch=batch, options=Options(**options))


def price(asked, cluster="8xh100", micro=1, **sizes):
    where = CATALOGUE.cluster(cluster)
    sizes.setdefault("data_parallel_size", where.devices)
    return price_layout(asked, where, Layout(**sizes), micro=micro)


def planned(capsys, line):
    assert main(["plan", *line.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("name", "active"), [("mixtral-8x7b", 12.88e9), ("qwen3-30b-a3b", 3.35e9), ("deepseek-v3", 37.55e9)]
)
def test_active_parameters_are_those_of_the_published_models(name, active):
    profile = named_model(name).profile()
    assert profile.active == pytest.approx(active, rel=1e-3)
    core = profile.layers * profile.attention_flops
    words = profile.first_parameters
    assert profile.forward_flops - core == pytest.approx(2 * profile.tokens * (profile.active - words), rel=1e-3)


def test_expert_ranks_share_experts_and_send_tokens():
    alone, shared = (price(job("mixtral-8x7b", experts=ranks), zero_stage=1) for ranks in (1, 8))
    experts = alone.job.profile.layers * alone.job.profile.expert_parameters
    halves = 2 * experts * 7 / 8
    assert alone.peak.weights - shared.peak.weights == pytest.approx(halves)
    assert alone.peak.optimizer == shared.peak.optimizer
    assert alone.sent(0)["data_parallel"] > 2 * shared.sent(0)["data_parallel"]
    assert alone.time.tensor == 0 < shared.time.tensor
    assert alone.time.compute == shared.time.compute


def test_the_fewest_blocks_are_computed_again():
    asked = job(batch=512)
    best = leaders(asked, CATALOGUE.cluster("8xa100-40g"), Pins(tensor=1, pipeline=1, zero=3, micro=8))[0]
    share, blocks = best.job.options.recomputed, asked.profile.layers
    assert best.layout.recompute == "full"
    assert 0 < share < 1
    fewer = replace(asked, options=Options(recomputed=share - 1 / blocks))
    assert best.fits
    assert not price_layout(fewer, best.cluster, best.layout, micro=8).fits
    every = price_layout(asked, best.cluster, best.layout, micro=8)
    assert best.time.recompute == pytest.approx(share * every.time.recompute)
    assert every.peak.total < best.peak.total


def test_the_call_of_a_partial_recompute_has_its_budget(capsys):
    found = planned(capsys, "llama-7b --cluster 8xa100-40g --batch 512 --micro 8 --tensor 1 --pipeline 1")
    assert 'recompute="auto", recompute_budget="' in found["plans"][0]["strategy"]
    assert round(32 * found["plans"][0]["options"]["recomputed"]) == 29  # the example of docs/planner.md


def test_selective_recompute_is_that_of_the_strategy(capsys):
    """It keeps results of products and attention: 11 of the 16 widths of a GPT's block, and no product runs twice."""
    asked = job("megatron-1.7b")
    profile = asked.profile
    none, selective, full = (
        profile.block_activations(tensor=1, sequence_parallel=False, recompute=mode)
        for mode in ("none", "selective", "full")
    )
    assert full < selective < 0.8 * none
    plain, again = (price(asked, recompute=mode).time for mode in ("none", "selective"))
    assert (again.recompute, again.compute) == (0, plain.compute)
    assert again.traffic > plain.traffic
    found = planned(capsys, "llama-7b --cluster 8xa100-80g --recompute selective")
    assert all('recompute="selective"' in plan["strategy"] for plan in found["plans"])


@pytest.mark.parametrize(("codec", "share"), [("bf16", 1 / 2), ("int8", (1 + 4 / 1024) / 4)])
def test_compressed_gradients_send_their_share(codec, share):
    plain, small = (price(job(compression=name), zero_stage=0).sent(0)["data_parallel"] for name in (None, codec))
    assert small == pytest.approx(share * plain)


def test_powersgd_sends_the_factors_of_each_matrix():
    asked = replace(job("megatron-1.7b", compression="powersgd"))
    sent = price(asked, zero_stage=0).sent(0)["data_parallel"]
    plain = price(job("megatron-1.7b"), zero_stage=0).sent(0)["data_parallel"]
    factors = sum(powersgd_elements(2304, columns, 4) for columns in (3 * 2304, 2304, 4 * 2304, 4 * 2304))
    vectors = asked.profile.vector_parameters
    assert sent / plain == pytest.approx((factors + vectors) / asked.profile.block_parameters, rel=0.05)


def test_a_hybrid_shard_gathers_inside_its_group_and_is_proposed():
    whole, hybrid = (price(job(), "4x8xh100", zero_stage=3, zero_shard_size=size) for size in (None, 8))
    assert hybrid.peak.optimizer == pytest.approx(4 * whole.peak.optimizer)
    slow = CATALOGUE.cluster("4x8xh100", cluster_link_gb_per_s=1.0)
    best = leaders(job(batch=256), slow, Pins(tensor=1, pipeline=1, zero=3, micro=1))[0]
    assert best.layout.zero_shard_size == 8


def test_one_kind_of_data_leaves_the_device():
    whole, optimizer, kept = (price(job(offload=kind), zero_stage=1) for kind in (None, "optimizer", "activations"))
    assert (optimizer.peak.optimizer, optimizer.peak.weights) == (0, whole.peak.weights)
    assert optimizer.peak.host == pytest.approx(whole.peak.optimizer)
    assert kept.peak.activations < 0.1 * whole.peak.activations
    assert optimizer.time.offload > whole.time.offload == 0


@pytest.mark.parametrize("kind", ["optimizer", "activations"])
def test_the_strategy_of_a_plan_takes_its_offload(capsys, kind):
    found = planned(capsys, f"gpt2 --cluster 2xcpu --batch 16 --precision 32 --offload {kind}")["plans"][0]
    assert found["not_run_by_this_package"] == []
    assert f"offload={{'{kind}': 'cpu'}}" in found["strategy"]
    made = re.search(r"strategy=(Strategy3D\(.*\))\)", found["strategy"])[1]
    assert getattr(eval(made, {"Strategy3D": Strategy3D}).settings.choices.offload, kind) is not None


def test_context_ranks_have_a_slice_of_each_sample():
    shape = named_model("llama3-8b").profile(precision="bf16-mixed")
    slices = shape.sliced(4)
    assert slices.tokens * 4 == shape.tokens
    assert slices.block_flops * 4 == shape.block_flops
    assert slices.parameters == shape.parameters
    asked = Job(profile=slices, samples=256, batch=256, options=Options(context=4))
    alone = Job(profile=shape, samples=64, batch=64)
    assert price(asked).peak.activations == pytest.approx(price(alone).peak.activations / 4)
    assert price(asked).time.tensor > 0


def test_fp8_doubles_the_rate_of_products_other_than_attention():
    half, eight = (price(job("llama3-8b", fp8=fp8)) for fp8 in (False, True))
    core = half.job.profile.attention_flops / half.job.profile.block_flops
    assert 0.5 < eight.time.compute / half.time.compute < 0.5 + core
    with pytest.raises(PlannerError, match="a100-80g has no fp8 rate"):
        price(job(fp8=True), "8xa100-80g")


def test_expert_ranks_are_priced_when_asked_for(capsys):
    found = planned(capsys, "mixtral-8x7b --cluster 8x8xh100 --batch 256 --expert-parallel 4")
    assert "expert_parallel_size=4" in found["plans"][0]["strategy"]


def test_the_fullest_expert_rank_takes_longer(capsys):
    def seconds(flags):
        asked = "mixtral-8x7b --cluster 8xh100 --tensor 1 --pipeline 1 --zero 3 --recompute full --batch 64 "
        return planned(capsys, asked + flags)["plans"][0]["step_seconds"]["total"]

    assert seconds("--expert-parallel 8") < seconds("--expert-parallel 8 --imbalance 1.5")
    assert seconds("--expert-parallel 1") == seconds("--expert-parallel 1 --imbalance 1.5")


def test_what_is_not_run_is_priced_when_asked_for_and_marked(capsys):
    found = planned(capsys, "mixtral-8x7b --cluster 8x8xh100 --batch 256 --fp8")
    assert found["plans"][0]["not_run_by_this_package"] == ["fp8"]
    assert "priced only, not run by this package: fp8" in found["notes"]
    assert found["plans"][0]["strategy"].startswith("not run by this package")


def test_context_ranks_are_proposed_where_nothing_fits_without(capsys):
    found = planned(capsys, "llama3-8b --sequence 1048576 --cluster 8x8xh100 --batch 8")
    assert "context_parallel_size=" in found["plans"][0]["strategy"]
    assert any("context ranks share each sample: no layout without them fits" in note for note in found["notes"])
    assert "context_parallel_size" not in planned(capsys, "llama3-8b --cluster 8x8xh100")["plans"][0]["strategy"]


def test_nothing_else_is_priced_unasked(capsys):
    found = planned(capsys, "mixtral-8x7b --cluster 8x8xh100 --batch 256")
    assert all(plan["not_run_by_this_package"] == [] for plan in found["plans"])
    assert found["job"]["active_parameters"] < 0.3 * found["job"]["parameters"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("gpt2 --expert-parallel 2", "gpt2 has no experts"),
        ("mixtral-8x7b --expert-parallel 3", "--expert-parallel 3 does not divide the 8 experts of mixtral-8x7b"),
        ("gpt2 --context-parallel 3", "does not divide the 1024 tokens"),
        ("gpt2 --context-parallel 0", "--context-parallel 0 must be at least 1"),
        ("mixtral-8x7b --imbalance 0.5", "--imbalance 0.5 must be at least 1"),
    ],
)
def test_impossible_options_are_refused(capsys, flags, message):
    assert main(["plan", *flags.split(), "--cluster", "8xh100"]) != 0
    assert message in capsys.readouterr().err


def test_the_docs_have_the_counts_of_named_mixtures():
    page = (Path(__file__).parents[2] / "docs/planner.md").read_text()
    counts = re.findall(r"([\d.]+B) of ([\d.]+B) for `([\w.-]+)`", page)
    assert len(counts) == 2
    for active, every, name in counts:
        profile = named_model(name).profile()
        assert [active, every] == [f"{profile.active / 1e9:.3g}B", f"{profile.parameters / 1e9:.3g}B"]
