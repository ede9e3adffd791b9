"""The layout to go on with on another number of ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_3d.errors import LayoutError
from lightning_3d.layout import Layout
from lightning_3d.strategy.run_note import refit


def sizes(layout):
    return layout.data_parallel_size, layout.tensor_parallel_size, layout.pipeline_parallel_size


@pytest.mark.parametrize(
    ("tensor", "pipeline", "windows", "world", "expected", "accumulate"),
    [
        (2, 1, 4, 4, (2, 2, 1), 2),  # half of the data ranks, twice the batches
        (2, 1, 4, 2, (1, 2, 1), 4),
        (2, 2, 4, 16, (4, 2, 2), 1),  # all are back
        (1, 1, 4, 3, (1, 1, 3), 4),  # 3 does not divide 4: the pipeline takes them
        (4, 1, 1, 2, (1, 2, 1), 1),  # not even one copy as it was
        (2, 2, 2, 2, (1, 2, 1), 2),
        (1, 1, 12, 3, (3, 1, 1), 4),
    ],
)
def test_data_goes_first_and_the_global_batch_stays(tensor, pipeline, windows, world, expected, accumulate):
    wanted = Layout(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
    layout, batches = refit(wanted, windows, world, blocks=8)
    assert sizes(layout) == expected
    assert batches == accumulate


def test_where_nothing_fits_it_says_what_would():
    with pytest.raises(LayoutError, match=r"5 ranks cannot resume.*4 batches.*Start 1, 2, 4 ranks"):
        refit(Layout(), 4, 5, blocks=2)


@pytest.mark.parametrize("blocks", [4, 5])
def test_a_v_needs_two_blocks_for_each_rank(blocks):
    v = Layout(pipeline_parallel_size=2, schedule="zbv_zero_bubble")
    assert sizes(refit(v, 4, 4, blocks)[0]) == (2, 1, 2)
    with pytest.raises(LayoutError, match="3 ranks cannot resume"):
        refit(v, 4, 3, blocks)
    assert sizes(refit(v, 4, 3, blocks=6)[0]) == (1, 1, 3)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 24), st.integers(1, 48), st.integers(1, 12))
def test_every_answer_keeps_the_global_batch(tensor, pipeline, windows, world, blocks):
    wanted = Layout(tensor_parallel_size=tensor, pipeline_parallel_size=pipeline, zero_stage=2)
    try:
        layout, accumulate = refit(wanted, windows, world, blocks)
    except LayoutError:
        data, rest = divmod(world, tensor * pipeline)
        assert rest or windows % data  # never where the data axis alone can do it
        return
    assert layout.world_size == world
    assert layout.data_parallel_size * accumulate == windows
    assert layout.zero_stage == 2
    assert tensor % layout.tensor_parallel_size == 0
    assert layout.pipeline_parallel_size in (1, pipeline) or layout.pipeline_parallel_size <= blocks
