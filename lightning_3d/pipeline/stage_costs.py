"""The cut of a pipeline into stages of equal cost, and its idle time by published closed forms.

The forms are those of Narayanan et al. 2021, and of the papers of each schedule. The planner uses them without torch.
"""

from functools import cache
from itertools import accumulate

from lightning_3d.layout import SCHEDULES, PassTimes, Schedule

EQUAL = PassTimes()


def bubble_time(
    schedule: Schedule, *, stages: int, chunks: int = 1, times: PassTimes = EQUAL, joined: bool = False
) -> float:
    """Time that a rank idles per step. The number of microbatches does not change it.

    Schedules that halve the backward need as many microbatches as ranks for it. Their formulas give the idle time of
    torch's orders: exact if backward for the inputs takes at least as long as forward, else approximate. `times` are
    those of a rank for one microbatch. `joined` is True where ranks wait for the last one before the next step, for
    example to clip gradients. Without that wait, ranks of `zbv_zero_bubble` that begin late end late and lose nothing.
    """
    return SCHEDULES[schedule].idle(stages - 1, chunks, times, joined) if stages > 1 else 0.0


def bubble_share(
    schedule: Schedule, *, stages: int, microbatches: int, chunks: int = 1, times: PassTimes = EQUAL
) -> float:
    """Idle time as a share of the whole step, in which ranks wait for the last: `(p-1)/(m+p-1)` for GPipe and 1F1B."""
    idle = bubble_time(schedule, stages=stages, chunks=chunks, times=times, joined=True)
    return idle / (idle + microbatches * times.total)


@cache
def balanced_cut(costs: tuple[float, ...], parts: int) -> tuple[int, ...]:
    """Bounds of the contiguous parts of `costs` with the smallest largest part; then, the smallest sum of squares."""
    prefix = [0.0, *accumulate(costs)]
    best: list[tuple[float, float, tuple[int, ...]] | None] = [(0.0, 0.0, ()), *[None] * len(costs)]
    for part in range(parts):
        following: list[tuple[float, float, tuple[int, ...]] | None] = [None] * len(best)
        for stop in range(part + 1, len(costs) - (parts - part - 1) + 1):
            options = []
            for start in range(part, stop):
                before = best[start]
                if before is not None:
                    cost = prefix[stop] - prefix[start]
                    options.append((max(before[0], cost), before[1] + cost * cost, (*before[2], start)))
            following[stop] = min(options, default=None)
        best = following
    final = best[-1]
    assert final is not None
    return *final[2], len(costs)
