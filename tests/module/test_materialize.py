"""Modules built on meta get memory and values, the same in every layout."""

import pytest
import torch
from torch import nn

from lightning_3d.errors import UnsupportedError
from lightning_3d.module.materialize import materialize
from lightning_3d.pipeline.split import apply_split, plan_split
from tests.parity import assert_same, train
from tests.workers import run
from tests.zoo.language import GPT


class MetaGPT(GPT):
    """Tied, and without memory until it is placed."""

    def __init__(self):
        with torch.device("meta"):
            super().__init__()


def _train(world, strategy):
    return train(f"{__name__}:MetaGPT", world, strategy, {"before": None}, {"max_epochs": 1})


@pytest.mark.parametrize(
    ("world", "strategy"),
    [(2, {"zero_stage": 3}), (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2})],
    ids=["zero3", "tensor-pipeline"],
)
def test_all_layouts_begin_with_the_same_values(world, strategy):
    (wanted,) = run(_train, 1, {}, world=1)
    assert wanted["losses"][-1] < wanted["losses"][0]
    assert_same(run(_train, world, strategy, world=world), wanted, 1e-5)


def test_tied_parameters_stay_tied_and_the_rest_keeps_its_values():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"), nn.Linear(2, 2, device="meta"))
    module[2].weight = module[1].weight
    kept = module[0].weight
    materialize(module, torch.device("cpu"))
    assert module[0].weight is kept
    assert module[2].weight is module[1].weight
    assert not any(parameter.is_meta for parameter in module.parameters())


def test_what_has_no_first_values_is_told():
    module = nn.Module()
    module.scale = nn.Parameter(torch.empty(3, device="meta"))
    with pytest.warns(UserWarning, match=r"Module were built on meta .* 1 submodules"):
        materialize(module, torch.device("cpu"))


def test_what_a_failed_run_has_left_in_parts_is_not_filled_with_other_values():
    module = GPT()
    apply_split(module, plan_split(module, num_stages=2), [0])
    with pytest.raises(UnsupportedError, match=r"left the module sharded"):
        materialize(module, torch.device("cpu"))
