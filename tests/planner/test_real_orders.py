"""The planner's bubbles and held activations are those of the actions that the executor runs."""

from itertools import accumulate, product

import pytest

from lightning_3d.errors import PlannerError
from lightning_3d.layout import Layout, PassTimes
from lightning_3d.pipeline.stage_costs import bubble_time
from lightning_3d.tools.pictures.timeline_pictures import timetable
from lightning_3d.tools.planner.search import ANYTHING, schedules
from tests.planner.closed_forms import idle

SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 4),
    ("interleaved_zero_bubble", 1),
    ("interleaved_zero_bubble", 3),
    ("zbv_zero_bubble", 2),
    ("dualpipev", 2),
    ("loopedbfs", 2),
]
SHAPES = [(2, 4), (3, 6), (4, 8), (4, 16), (8, 16)]
TIMES = [
    PassTimes(forward=f, backward_input=b, backward_weight=w)
    for f, b, w in product((0.5, 1.0), (1.0, 1.3, 2.0, 3.0), (0.4, 1.0, 1.6, 4.0))
]


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("joined", [False, True])
def test_bubbles(schedule, chunks, joined):
    """Wherever a backward for the inputs takes no less than a forward."""
    for (stages, microbatches), times in product(SHAPES, TIMES):
        played = timetable(schedule, stages=stages, microbatches=microbatches, chunks=chunks, times=times)
        said = bubble_time(schedule, stages=stages, chunks=chunks, times=times, joined=joined)
        assert said == pytest.approx(idle(played, joined=joined)), (stages, microbatches, times)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 8, 9, 16])
def test_bubbles_of_every_schedule_that_the_search_prices(stages, microbatches):
    for schedule, chunks in schedules(stages, microbatches, 32, ANYTHING):
        played = timetable(schedule, stages=stages, microbatches=microbatches, chunks=chunks)
        said = bubble_time(schedule, stages=stages, chunks=chunks, joined=True)
        assert said == pytest.approx(idle(played, joined=True)), (schedule, chunks)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_bubbles_of_long_forwards_are_near(schedule, chunks):
    """Within a third of a bubble of 1F1B, where forwards take longer than backwards (no product does)."""
    times = PassTimes(forward=1.5, backward_input=1.0, backward_weight=0.8)
    played = timetable(schedule, stages=4, microbatches=12, chunks=chunks, times=times)
    for joined in (False, True):
        said = bubble_time(schedule, stages=4, chunks=chunks, times=times, joined=joined)
        assert said == pytest.approx(idle(played, joined=joined), abs=3 * times.total / 3)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_activations_that_are_kept(schedule, chunks, stages, microbatches):
    played = timetable(schedule, stages=stages, microbatches=microbatches, chunks=chunks, times=TIMES[0])
    layout = Layout(schedule=schedule, pipeline_parallel_size=stages, stages_per_rank=chunks)
    said = layout.held(0, microbatches)
    most = [most_kept(played, rank) for rank in range(stages)]
    assert most[0] / chunks == said
    assert max(most) == most[0]


def most_kept(played, rank):
    """Most virtual stages' activations that a rank has at once."""
    changes = {"F": 1, "I": 0, "B": -1, "W": -1}
    return max(accumulate(changes[done.kind] for done in played if done.rank == rank))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"])
def test_nothing_starts_before_what_it_waits_for(schedule):
    chunks = 2 if schedule == "zbv_zero_bubble" else 1
    played = timetable(schedule, stages=3, microbatches=9, chunks=chunks)
    end = {("I" if done.kind == "B" else done.kind, done.stage, done.microbatch): done.end for done in played}
    free = [0.0] * 3
    for done in played:
        assert done.start >= free[done.rank]
        free[done.rank] = done.end
        before = {"F": ("F", done.stage - 1), "W": ("I", done.stage)}.get(done.kind, ("I", done.stage + 1))
        assert done.start >= end.get((*before, done.microbatch), 0.0)
        if done.kind in "BI":
            assert done.start >= end["F", done.stage, done.microbatch]
    assert len(end) == len(played) == (2 if schedule == "1f1b" else 3) * 3 * chunks * 9


def test_what_has_no_timetable():
    with pytest.raises(PlannerError, match="0 microbatches"):
        timetable("1f1b", stages=2, microbatches=0)
