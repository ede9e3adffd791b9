"""The plan against published trainings: docs/published_runs.md."""

import re
from pathlib import Path

import pytest

from lightning_3d.tools.planner import step_time
from lightning_3d.tools.planner.job import Job
from lightning_3d.tools.planner.known_models import named_model
from lightning_3d.tools.planner.search import leaders
from tests.planner.published import CATALOGUE, FAMILIES, RUNS, compared, families, family, mean, sources, table

PAGE = (Path(__file__).parents[2] / "docs/published_runs.md").read_text()
FOUND = [compared(run) for run in RUNS]
HELD_BACK = [one for one in FOUND if {"fit", "known"}.isdisjoint(one.run)]


@pytest.mark.parametrize("one", FOUND, ids=lambda one: one.run["name"])
def test_the_plan_is_within_a_quarter_of_what_was_measured(one):
    assert (0.8 <= one.ratio <= 1.25) == ("missed" not in one.run), one.ratio


def test_the_mean_ratio_is_within_a_tenth():
    assert len(HELD_BACK) >= 30
    for rows in (FOUND, HELD_BACK):
        assert mean([one.ratio for one in rows]) == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_is_near_what_was_measured(name):
    own = [one for one in FOUND if family(one.run) == name]
    assert 0.85 <= mean([one.ratio for one in own]) <= 1.18
    assert all(0.6 <= one.ratio <= 1.6 for one in own)


def test_two_layouts_of_gpus_that_did_run_are_said_not_to_fit():
    wrong = {one.run["name"] for one in FOUND if not one.plan.fits}
    assert {name for name in wrong if "TPU" not in name} == {"GPT 530B ZeRO 3 on 640", "Llama 3 405B on 8192 H100"}
    assert len(wrong) == 5 and "Five layouts that did run" in PAGE


def test_the_page_has_what_is_computed():
    assert table(FOUND) in PAGE
    assert families(FOUND) in PAGE and families([one for one in FOUND if "collected" in one.run]) in PAGE
    assert sources() in PAGE
    assert len(BEST) == PAGE.count("M |\n")
    off = [one for one in FOUND if "missed" in one.run]
    assert re.search(r"(\d+) of (\d+) rows", PAGE).groups() == (str(len(FOUND) - len(off)), str(len(FOUND)))
    means = [f"{mean([one.ratio for one in rows]):.2f}" for rows in (FOUND, HELD_BACK)]
    found = re.search(r"is (\d\.\d\d), and (\d\.\d\d) for the (\d+) rows", PAGE).groups()
    assert found == (*means, str(len(HELD_BACK)))
    for one in off:
        assert f"- **{one.run['name']}**: {one.run['missed']}." in PAGE


def test_the_page_has_the_constants():
    in_code = re.findall(r"^\| `([A-Z_0-9]+)` \| ([\d.]+) \|", PAGE, re.MULTILINE)
    shares = re.findall(r"^\| `matrix_share` of `([\w-]+)` \| ([\d.]+) \|", PAGE, re.MULTILINE)
    assert (len(in_code), len(shares)) == (5, 3) and "| `attention_share` of `h100` | 0.4 |" in PAGE
    assert all(getattr(step_time, name) == float(value) for name, value in in_code)
    assert all(CATALOGUE.find(name).matrix_share == float(value) for name, value in shares)


BEST = re.findall(r"^\| (\S+) \| (\S+)T \| (\S+) \| (\d+) \| ([\d.]+)M \| ([\d.]+)M \|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("model", "tokens", "cluster", "batch", "published", "planned"), BEST)
def test_the_best_layout_where_none_is_published(model, tokens, cluster, batch, published, planned):
    where = CATALOGUE.cluster(cluster)
    profile = named_model(model).profile(precision="bf16-mixed")
    samples = 1e12 * float(tokens) / profile.tokens
    job = Job(profile=profile, samples=samples, batch=int(batch), precision="bf16-mixed")
    assert f"{leaders(job, where)[0].device_hours / 1e6:.3g}" == planned


def test_kernels_that_save_less_train_the_largest_in_the_published_time():
    """With weights and gradients of 4 bytes the largest model has no room for its activations."""

    def best(precision, kernels):
        profile = named_model("llama3-405b").profile(precision=precision, kernels=kernels)
        job = Job(profile=profile, samples=15.6e12 / profile.tokens, batch=2048, precision=precision)
        own = {"attention_share": None} if kernels == "fused" else {}
        return leaders(job, CATALOGUE.cluster("2048x8xh100", **own))[0]

    true, mixed = (best(precision, "eager").job.options.recomputed for precision in ("bf16-true", "bf16-mixed"))
    assert f"for the activations of {round(16 * (1 - mixed))} of 16 blocks" in PAGE
    assert f"there is room for {round(16 * (1 - true))} of 16" in PAGE
    fused = best("bf16-true", "fused")
    assert f"{fused.device_hours / 1e6:.3g}M device-hours, {fused.seconds / 86400:.0f} days." in " ".join(PAGE.split())
    assert fused.device_hours == pytest.approx(30.84e6, rel=0.1)
    assert fused.layout.recompute == "none"
