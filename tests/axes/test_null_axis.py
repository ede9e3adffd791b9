"""The seam for one more axis: `null`, whose ranks repeat each other, is made here alone, and no file of the package.

It trains to equal losses, saves and loads, is planned and dry-run.
"""

from dataclasses import dataclass

import pytest

from lightning_3d import Layout, Strategy3D
from lightning_3d.layout import CONTEXT_AXIS, DATA_AXIS, PIPELINE_AXIS, TENSOR_AXIS
from lightning_3d.tools.planner.priced_layout import price_layout
from tests.checkpoint.trainings import assert_goes_on
from tests.dryrun.test_same import assert_same
from tests.parity import assert_parity, long
from tests.planner.test_options import CATALOGUE, job

NULL_AXIS = "null_parallel"


@dataclass(frozen=True, kw_only=True)
class NullLayout(Layout):
    axes = (PIPELINE_AXIS, DATA_AXIS, NULL_AXIS, CONTEXT_AXIS, TENSOR_AXIS)
    null_parallel_size: int = 2


class NullStrategy(Strategy3D):
    layout_class = NullLayout


def test_places_and_messages_name_the_axis():
    layout = NullLayout(tensor_parallel_size=2).fit(8)
    assert layout.sizes == {PIPELINE_AXIS: 1, DATA_AXIS: 2, NULL_AXIS: 2, TENSOR_AXIS: 2}
    assert str(layout) == "data 2 x tensor 2 x null 2 x pipeline 1, ZeRO 1"
    assert str(layout.coordinate(6)) == "pipeline 0, data 1, null 1, tensor 0"
    assert [layout.rank(layout.coordinate(rank)) for rank in range(8)] == list(range(8))
    assert layout.peers_of(1) == [4, 5, 6, 7]


@pytest.mark.parametrize(
    "strategy",
    [
        long({"zero_stage": 0}, id="zero0"),
        pytest.param({"zero_stage": 3, "verify": "replicas"}, id="zero3"),
        long({"tensor_parallel_size": 2}, id="tensor"),
        pytest.param({"pipeline_parallel_size": 2}, id="pipeline"),
    ],
)
def test_null_ranks_train_as_one_device(strategy):
    assert_parity("GPT", 4, {**strategy, "kind": NullStrategy}, trainer={"gradient_clip_val": 0.5})


@pytest.mark.parametrize(
    "other", [{"kind": NullStrategy, "tensor_parallel_size": 2}, {"zero_stage": 1}], ids=["null", "data"]
)
def test_a_checkpoint_of_null_ranks_loads_with_and_without_them(tmp_path, other):
    null = {"kind": NullStrategy, "zero_stage": 3, "checkpoint_format": "sharded"}
    assert_goes_on(tmp_path / "saved", "GPT", null, 4, other)


def test_a_dry_run_says_what_null_ranks_hold_and_send():
    assert_same("MLP", 4, {"kind": NullStrategy, "zero_stage": 1}, setup=False)


def test_null_ranks_are_planned_as_copies_of_those_without():
    asked, where = job(batch=64), CATALOGUE.cluster("8xh100")
    null, plain = (
        price_layout(asked, where, kind(data_parallel_size=4, zero_stage=1), micro=1) for kind in (NullLayout, Layout)
    )
    assert null.layout.world_size == 2 * plain.layout.world_size == 8
    assert null.memory == plain.memory
    assert null.sent(0) == plain.sent(0)
