from pathlib import Path
from typing import get_args

import pytest

from lightning_3d.errors import LayoutError
from lightning_3d.layout import PIPELINE_AXIS, SCHEDULES, TENSOR_AXIS, Layout, Schedule


def test_rank_and_coordinate_are_inverse_and_tensor_is_innermost():
    layout = Layout(pipeline_parallel_size=2, data_parallel_size=3, tensor_parallel_size=4)
    assert [layout.rank(layout.coordinate(rank)) for rank in range(24)] == list(range(24))
    assert [layout.coordinate(rank)[TENSOR_AXIS] for rank in range(4)] == [0, 1, 2, 3]
    assert layout.coordinate(12)[PIPELINE_AXIS] == 1


@pytest.mark.parametrize(
    ("sizes", "stages"),
    [({}, 1), ({"pipeline_parallel_size": 3}, 3), ({"pipeline_parallel_size": 3, "schedule": "zbv_zero_bubble"}, 6),
     ({"pipeline_parallel_size": 3, "schedule": "interleaved_1f1b", "stages_per_rank": 4}, 12)],
)  # fmt: skip
def test_stages_are_those_of_all_ranks(sizes, stages):
    layout = Layout(**sizes)
    assert layout.num_stages == stages
    assert sorted(stage for own in layout.stages for stage in own) == list(range(stages))


def test_fit_gives_the_data_axis_what_is_left():
    assert Layout(tensor_parallel_size=2, pipeline_parallel_size=2).fit(12).data_parallel_size == 3


def test_a_world_that_does_not_divide_is_refused_with_numbers():
    with pytest.raises(LayoutError, match=r"6 ranks cannot be split .* = 4 ranks .* multiple of 4"):
        Layout(tensor_parallel_size=2, pipeline_parallel_size=2).fit(6)
    with pytest.raises(LayoutError, match=r"= 2 ranks, but the job has 3"):
        Layout(data_parallel_size=2).check_world(3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"zero_stage": 4},
        {"schedule": "2f2b"},
        {"tensor_parallel_size": 0},
        {"tensor_parallel_size": 1.5},
        {"num_microbatches": 0},
        {"data_parallel_size": 4, "zero_shard_size": 3},
    ],
)
def test_unknown_values_are_refused_by_name(wrong):
    with pytest.raises(LayoutError, match=list(wrong)[-1]):
        Layout(**wrong)


def test_a_schedule_has_a_name_a_row_and_a_formula_in_the_documentation():
    assert tuple(SCHEDULES) == get_args(Schedule)
    page = (Path(__file__).parents[1] / "docs/pipeline.md").read_text()
    rows = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert [name for name in SCHEDULES if f"`{name}`" not in rows] == []
