import re
from dataclasses import replace

import pytest

from lightning_3d.errors import LayoutError, PlannerError
from lightning_3d.layout import Layout
from lightning_3d.tools.planner.catalogue import Catalogue
from lightning_3d.tools.planner.choose import Ability, Fixed, Loading, choose_layout
from lightning_3d.tools.planner.job import Options
from lightning_3d.tools.planner.known_models import named_model
from lightning_3d.tools.planner.profile_module import count_module
from tests.zoo.planned import TinyGPT

CATALOGUE = Catalogue.load()


def counted(name):
    """What is known of a model before any batch has been seen."""
    profile = named_model(name).profile(precision="bf16-mixed")
    names = "block_flops attention_flops last_flops whole_bytes split_bytes attention_bytes first_bytes last_bytes"
    return replace(profile, **dict.fromkeys(names.split(), 0))


@pytest.mark.parametrize("cluster", ["2xcpu", "8xa100", "3xcpu", "4x8xh100"])
def test_small_models_get_plain_data_parallelism_with_zero_1(cluster):
    where = CATALOGUE.cluster(cluster)
    layout, why = choose_layout(count_module(TinyGPT(), name="TinyGPT"), where)
    assert layout.data_parallel_size == where.devices
    assert layout.zero_stage == 1
    assert len(why.splitlines()) == 3
    assert "TinyGPT" in why


def test_context_ranks_share_a_sample_that_fits_on_no_rank():
    profile = named_model("llama-8b").with_sequence(131072).profile(precision="bf16-mixed")
    job = {"loading": Loading(samples=1), "precision": "bf16-mixed", "base": Layout(recompute="full")}
    where, alone = CATALOGUE.cluster("8xh100"), Fixed(tensor=1, pipeline=1)
    whole, why = choose_layout(profile, where, fixed=alone, **job)
    assert whole.context_parallel_size == 1
    assert "no layout fits for certain" in why
    shared, why = choose_layout(profile, where, fixed=alone, ability=Ability(context=True), **job)
    assert shared.context_parallel_size == 2
    assert shared.data_parallel_size == 4
    assert "the simplest, data 8 x tensor 1 x pipeline 1, ZeRO 1, would need" in why
    kept, why = choose_layout(profile, where, fixed=Fixed(context=4), **job)
    assert kept.context_parallel_size == 4
    assert kept.world_size == 8
    assert why.endswith("context_parallel_size=4 is fixed.")
    with pytest.raises(LayoutError, match="no layout of 8 ranks has context_parallel_size=3"):
        choose_layout(profile, where, fixed=Fixed(context=3), **job)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("model", "cluster"), [("13b", "8xa100-40g"), ("llama-70b", "8x8xh100"), ("gpt3-175b", "64x8xh100")]
)
def test_large_models_are_split_until_they_fit(model, cluster, known):
    where = CATALOGUE.cluster(cluster)
    profile = named_model(model).profile() if known else counted(model)
    loading = Loading(samples=8) if known else None
    layout, why = choose_layout(profile, where, loading=loading, precision="bf16-mixed")
    assert layout.world_size == where.devices
    assert layout.zero_stage > 1 or layout.tensor_parallel_size * layout.pipeline_parallel_size > 1
    assert layout.tensor_parallel_size <= 8
    assert len(why.splitlines()) == 3


def test_what_fits_nowhere_is_an_error():
    with pytest.raises(PlannerError, match="does not fit on 1x1xt4"):
        choose_layout(counted("gpt3-175b"), CATALOGUE.cluster("t4"), precision="bf16-mixed")


def test_what_is_fixed_or_cannot_be_done_is_not_chosen_otherwise():
    profile, where = named_model("13b").profile(), CATALOGUE.cluster("2x8xa100-40g")

    def chosen(**choices):
        return choose_layout(profile, where, loading=Loading(samples=8), precision="bf16-mixed", **choices)

    layout, why = chosen(fixed=Fixed(tensor=4, zero=0))
    assert (layout.tensor_parallel_size, layout.zero_stage) == (4, 0)
    assert "tensor_parallel_size=4, zero_stage=0 is fixed" in why
    layout, why = chosen(ability=Ability(tensor=False, pipeline=1, reasons=("it is made of one piece",)))
    assert (layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.zero_stage) == (1, 1, 3)
    assert "it is made of one piece" in why.splitlines()[2]
    with pytest.raises(LayoutError, match="no layout of 16 ranks has data_parallel_size=3"):
        chosen(fixed=Fixed(data=3))


def test_slow_links_between_nodes_are_crossed_by_activations_rather_than_weights():
    slow = CATALOGUE.cluster("4x1xa100-80g", cluster_link_gb_per_s=0.5)
    layout, why = choose_layout(named_model("1.5b").profile(), slow, loading=Loading(samples=2), precision="bf16-mixed")
    assert layout.pipeline_parallel_size > 1
    assert "less time than with the simplest" in why


def test_what_is_given_besides_sizes_is_priced():
    profile, where = named_model("llama-7b").profile(), CATALOGUE.cluster("8xa100-80g")

    def chosen(recompute="none", compression=None, shard=None):
        layout, why = choose_layout(
            profile,
            where,
            loading=Loading(samples=8),
            base=Layout(recompute=recompute),
            fixed=Fixed(shard=shard),
            precision="bf16-mixed",
            options=Options(compression=compression),
        )
        return layout, re.search(r"need ([\d.]+) GB", why)[1]

    plain, again = chosen(), chosen("full")
    assert float(again[1]) < float(plain[1])
    assert again[0].recompute == "full"
    hybrid, _ = chosen("full", shard=4)
    assert hybrid.zero_shard_size == 4
    with pytest.raises(LayoutError, match="has zero_shard_size=3"):
        chosen(shard=3)


def test_data_ranks_share_experts_where_nothing_simpler_fits():
    profile, where = named_model("mixtral-8x7b").profile(), CATALOGUE.cluster("4x8xh100")

    def chosen(ability, **given):
        loading = Loading(samples=1)
        return choose_layout(
            profile, where, loading=loading, fixed=Fixed(tensor=1, pipeline=1, **given), ability=ability,
            precision="bf16-mixed", base=Layout(recompute="full"),
        )[0]  # fmt: skip

    assert chosen(Ability()).expert_parallel_size == 1
    assert chosen(Ability(experts=(8,) * 32)).expert_parallel_size in (2, 4, 8)
    assert chosen(Ability(experts=(8,) * 32), zero=3, experts=4).expert_parallel_size == 4
    assert chosen(Ability(experts=(8, 7))).expert_parallel_size == 1
