"""The planner's bubbles and held activations are those of the actions that the executor runs."""

from itertools import product

import pytest

from lightning_3d.pipeline.schedule import actions, stage_ranks
from lightning_3d.planner.bubble import PassTimes, bubble_time
from lightning_3d.planner.formulas import microbatches_held

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


class Played:
    """One step of the executor's actions, each begun as soon as its rank and what it waits for allow."""

    def __init__(self, schedule, ranks, microbatches, chunks, times):
        self.placement, self.chunks = stage_ranks(schedule, ranks, chunks), chunks
        self.times = {"F": times.forward, "I": times.backward_input, "W": times.backward_weight}
        self.times["B"] = times.backward_input + times.backward_weight
        self.done, self.held, self.most = {}, [0] * ranks, [0] * ranks
        self.begun, self.free, self.busy = [None] * ranks, [0.0] * ranks, [0.0] * ranks
        orders = actions(schedule, schedule, ranks, chunks, microbatches)
        waiting = [[action for action in order if action.kind in self.times] for order in orders]
        while any(waiting):
            able = [rank for rank in range(ranks) if waiting[rank] and self.ready(waiting[rank][0]) is not None]
            assert able, "the actions wait for each other in a circle"
            for rank in able:
                self.play(rank, waiting[rank].pop(0))

    def ready(self, action):
        """When everything that `action` needs is there; None as long as something has not been played."""
        kind, stage, index = action
        needed = {"F": [("F", stage - 1, index)], "W": [("I", stage, index)]}
        backward = [("F", stage, index), ("I", stage + 1, index)]
        needs = [key for key in needed.get(kind, backward) if 0 <= key[1] < len(self.placement)]
        return max((self.done[key] for key in needs), default=0.0) if all(key in self.done for key in needs) else None

    def play(self, rank, action):
        kind, stage, index = action
        begin = max(self.free[rank], self.ready(action))
        took = self.times[kind] / self.chunks
        self.begun[rank] = begin if self.begun[rank] is None else self.begun[rank]
        self.done["I" if kind == "B" else kind, stage, index] = self.free[rank] = begin + took
        self.busy[rank] += took
        self.held[rank] += {"F": 1, "I": 0, "B": -1, "W": -1}[kind]
        self.most[rank] = max(self.most[rank], self.held[rank])

    def idle(self, joined):
        if joined:
            return max(self.free) - self.busy[0]
        return max(end - begin for begin, end in zip(self.begun, self.free, strict=True)) - self.busy[0]


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("joined", [False, True])
def test_bubbles(schedule, chunks, joined):
    """Wherever a backward for the inputs takes no less than a forward."""
    for (stages, microbatches), times in product(SHAPES, TIMES):
        played = Played(schedule, stages, microbatches, chunks, times)
        said = bubble_time(schedule, stages=stages, chunks=chunks, times=times, joined=joined)
        assert said == pytest.approx(played.idle(joined)), (stages, microbatches, times)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_bubbles_of_long_forwards_are_near(schedule, chunks):
    """Within a third of a bubble of 1F1B, where forwards take longer than backwards (no product does)."""
    times = PassTimes(forward=1.5, backward_input=1.0, backward_weight=0.8)
    played = Played(schedule, 4, 12, chunks, times)
    for joined in (False, True):
        said = bubble_time(schedule, stages=4, chunks=chunks, times=times, joined=joined)
        assert said == pytest.approx(played.idle(joined), abs=3 * times.total / 3)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), SHAPES)
def test_activations_that_are_kept(schedule, chunks, stages, microbatches):
    played = Played(schedule, stages, microbatches, chunks, TIMES[0])
    said = microbatches_held(schedule, stages=stages, chunks=chunks, microbatches=microbatches)
    assert played.most[0] / chunks == said
    assert max(played.most) == played.most[0]
