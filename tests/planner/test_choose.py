from dataclasses import replace

import pytest

from lightning_3d.errors import PlannerError
from lightning_3d.planner.catalogue import Catalogue
from lightning_3d.planner.choose import choose_layout
from lightning_3d.planner.inspection import count_module
from lightning_3d.planner.names import named_model
from tests.planner.modules import TinyGPT

CATALOGUE = Catalogue.load()


def counted(name):
    """What is known of a model before any batch has been seen."""
    profile = named_model(name).profile(precision="bf16-mixed")
    zero = dict.fromkeys(
        ("block_flops", "attention_flops", "last_flops", "whole_bytes", "split_bytes", "attention_bytes", "last_bytes"),
        0,
    )
    return replace(profile, **zero)


@pytest.mark.parametrize("cluster", ["2xcpu", "8xa100", "3xcpu", "4x8xh100"])
def test_small_models_get_plain_data_parallelism_with_zero_1(cluster):
    where = CATALOGUE.cluster(cluster)
    layout, why = choose_layout(count_module(TinyGPT(), name="TinyGPT"), where)
    assert layout.data_parallel_size == where.devices
    assert layout.zero_stage == 1
    assert len(why.splitlines()) == 3
    assert "TinyGPT" in why


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("model", "cluster"), [("13b", "8xa100-40g"), ("llama-70b", "8x8xh100"), ("gpt3-175b", "64x8xh100")]
)
def test_large_models_are_split_until_they_fit(model, cluster, known):
    where = CATALOGUE.cluster(cluster)
    profile = named_model(model).profile() if known else counted(model)
    batch = 8 if known else None
    layout, why = choose_layout(profile, where, batch_per_device=batch, precision="bf16-mixed")
    assert layout.world_size == where.devices
    assert layout.zero_stage > 1 or layout.tensor_parallel_size * layout.pipeline_parallel_size > 1
    assert layout.tensor_parallel_size <= 8
    assert len(why.splitlines()) == 3


def test_what_fits_nowhere_is_an_error():
    with pytest.raises(PlannerError, match="does not fit on 1x1xt4"):
        choose_layout(counted("gpt3-175b"), CATALOGUE.cluster("t4"), precision="bf16-mixed")
