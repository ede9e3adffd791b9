import pytest

from lightning_3d.errors import PlannerError
from lightning_3d.planner.bubble import PassTimes, bubble_share, bubble_time
from lightning_3d.planner.formulas import microbatches_held
from lightning_3d.planner.timetable import timetable

FIXED = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 3),
    ("loopedbfs", 2),
    ("interleaved_zero_bubble", 1),
    ("interleaved_zero_bubble", 2),
]


@pytest.mark.parametrize(("schedule", "chunks"), FIXED)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (4, 8), (8, 24)])
def test_played_out_bubbles_are_the_closed_forms(schedule, chunks, stages, microbatches):
    shape = {"stages": stages, "microbatches": microbatches, "chunks": chunks}
    assert timetable(schedule, **shape).bubble_share == pytest.approx(bubble_share(schedule, **shape))


@pytest.mark.parametrize(("schedule", "chunks"), FIXED)
def test_played_out_memory_is_the_closed_form(schedule, chunks):
    played = timetable(schedule, stages=4, microbatches=16, chunks=chunks)
    assert played.held(0) / chunks == microbatches_held(schedule, stages=4, chunks=chunks, microbatches=16)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "loopedbfs"])
def test_unequal_passes(schedule):
    times = PassTimes(forward=1.0, backward_input=1.3, backward_weight=0.8)
    chunks = 2 if schedule in ("interleaved_1f1b", "loopedbfs") else 1
    played = timetable(schedule, stages=4, microbatches=8, chunks=chunks, times=times)
    assert played.span - played.busy == pytest.approx(bubble_time(schedule, stages=4, chunks=chunks, times=times))


@pytest.mark.parametrize("schedule", ["zbv_zero_bubble", "dualpipev"])
def test_v_schedules_idle_less_than_1f1b_and_keep_no_more(schedule):
    played = timetable(schedule, stages=4, microbatches=12, chunks=2)
    assert played.bubble_share < 0.35 * bubble_share("1f1b", stages=4, microbatches=12)
    assert all(played.held(rank) <= 2 * 4 for rank in range(4))


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble", "zbv_zero_bubble"])
def test_nothing_starts_before_what_it_waits_for(schedule):
    chunks = 2 if schedule == "zbv_zero_bubble" else 1
    played = timetable(schedule, stages=3, microbatches=7, chunks=chunks)
    end = {(done.kind, done.stage, done.microbatch): done.end for done in played.passes}
    free = [0.0] * 3
    for done in played.passes:
        assert done.start >= free[done.rank]
        free[done.rank] = done.end
        if done.kind == "F" and done.stage:
            assert done.start >= end["F", done.stage - 1, done.microbatch]
        if done.kind == "B" and done.stage < 3 * chunks - 1:
            assert done.start >= end["B", done.stage + 1, done.microbatch]
        if done.kind == "W":
            assert done.start >= end["B", done.stage, done.microbatch]
    kinds = 2 if schedule == "1f1b" else 3
    assert len(end) == len(played.passes) == kinds * 3 * chunks * 7


def test_what_has_no_timetable():
    with pytest.raises(PlannerError, match="0 microbatches"):
        timetable("1f1b", stages=2, microbatches=0)
    with pytest.raises(PlannerError, match="2 stages per rank"):
        timetable("zbv_zero_bubble", stages=2, microbatches=4)
