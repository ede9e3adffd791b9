"""Context ranks are peers: they see the same samples and have one copy of the states together."""

import pytest
import torch

from lightning_3d import Layout, Strategy3D
from lightning_3d.errors import ConfigurationError
from tests.checkpoint.trainings import train
from tests.parity import assert_parity, long
from tests.workers import run


def test_places_and_messages_name_the_axis():
    layout = Layout(context_parallel_size=2, tensor_parallel_size=2).fit(8)
    assert str(layout) == "data 2 x tensor 2 x context 2 x pipeline 1, ZeRO 1"
    assert str(layout.coordinate(6)) == "pipeline 0, data 1, context 1, tensor 0"
    assert layout.shards == layout.gradient_ranks == 4
    assert str(Layout()) == "data 1 x tensor 1 x pipeline 1, ZeRO 1"


@pytest.mark.parametrize("name", ["cp_size", "sp_size", "ulysses_degree"])
def test_names_of_others_are_answered(name):
    with pytest.raises(ConfigurationError, match=f"no argument {name}.*context_parallel_size"):
        Strategy3D(**{name: 2})


@pytest.mark.parametrize(
    "strategy",
    [
        long({"zero_stage": 0}, id="zero0"),
        long({"zero_stage": 1}, id="zero1"),
        long({"zero_stage": 2, "verify": "replicas"}, id="zero2"),
        pytest.param({"zero_stage": 3, "verify": "replicas"}, id="zero3"),
        pytest.param({"zero_stage": 3, "zero_shard_size": 1, "verify": "replicas"}, id="copies"),
        long({"zero_stage": 1, "tensor_parallel_size": 2}, id="tensor"),
        long({"zero_stage": 1, "pipeline_parallel_size": 2}, id="pipeline"),
    ],
)
def test_states_are_sharded_over_data_and_context(strategy):
    assert_parity("GPT", 4, {"context_parallel_size": 2, **strategy}, trainer={"gradient_clip_val": 0.5})


@pytest.mark.parametrize(
    ("name", "other"),
    [
        pytest.param("GPT", {"context_parallel_size": 2, "zero_stage": 1}, id="with"),
        pytest.param("GPT", {"zero_stage": 3}, id="without"),
        long("tests.context.test_bytes:Mixed", {"zero_stage": 1}, id="mixer"),
    ],
)
def test_a_checkpoint_loads_with_and_without_the_axis(tmp_path, name, other):
    path = str(tmp_path / "saved")
    context = {"context_parallel_size": 2, "zero_stage": 3, "checkpoint_format": "sharded"}
    (whole,) = run(train, name, 1, None, 5, world=1)
    run(train, name, 4, context, 3, None, path, world=4)
    for result in run(train, name, 4, other, 5, path, world=4):
        assert result["losses"][-2:] == pytest.approx(whole["losses"][-2:], rel=1e-5)
        for name, weight in whole["weights"].items():
            torch.testing.assert_close(result["weights"][name], weight, rtol=1e-5, atol=1e-5)
