"""Idle time of a pipeline, in closed form per schedule.

Times are those of one rank's whole share of a microbatch: forward, backward for the inputs, backward for the weights.
From the papers on GPipe, PipeDream-Flush (1F1B), interleaving (Narayanan et al. 2021), breadth-first pipelines
(Lamy-Poirier 2022), zero bubble (Qi et al. 2023, 2024) and DualPipe (DeepSeek 2024).
"""

from dataclasses import dataclass
from typing import get_args

from lightning_3d.errors import PlannerError
from lightning_3d.layout import Schedule


@dataclass(frozen=True, kw_only=True)
class PassTimes:
    """Seconds (or any unit) that a rank spends on one microbatch."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0

    @property
    def total(self) -> float:
        return self.forward + self.backward_input + self.backward_weight


EQUAL = PassTimes()


def bubble_time(
    schedule: Schedule, *, stages: int, chunks: int = 1, times: PassTimes = EQUAL, joined: bool = False
) -> float:
    """Time that a rank idles per step, with at least two microbatches for each stage. More do not change it.

    For schedules that halve the backward the formulas give the idle time of torch's orders. They are exact if backward
    for the inputs takes at least as long as forward, else approximate.

    Args:
        schedule: order of passes.
        stages: pipeline ranks.
        chunks: virtual stages of a rank.
        times: what a rank spends on one microbatch.
        joined: True where ranks wait for the last one before the next step, for example to clip gradients. Without
            that wait, ranks of `zbv_zero_bubble` that begin late end late and lose nothing.
    """
    if schedule not in get_args(Schedule):
        raise PlannerError(f"schedule {schedule!r} is not one of {', '.join(get_args(Schedule))}.")
    if stages < 1 or chunks < 1:
        raise PlannerError(f"{stages} stages of {chunks} chunks are no pipeline: give at least 1 of each.")
    if stages == 1:
        return 0.0
    ramp = stages - 1
    if schedule in ("gpipe", "1f1b"):
        return ramp * times.total
    if schedule in ("interleaved_1f1b", "loopedbfs"):
        return ramp * times.total / chunks
    if schedule == "interleaved_zero_bubble":
        late = times.backward_input + max(0.0, times.forward - times.backward_weight)
        return ramp * (max(times.forward, late) if joined else late) / chunks
    if schedule == "dualpipev":
        return _dualpipev(ramp, times)
    assert schedule == "zbv_zero_bubble", f"{schedule} has no formula for its idle time"
    return _zbv(ramp, times, joined)


def _zbv(ramp: int, times: PassTimes, joined: bool) -> float:
    """Nothing where the three passes take equally long and ranks need not wait for one another."""
    f, b, w = times.forward, times.backward_input, times.backward_weight
    longest = max(f, b)
    uneven = longest / 2 if joined else abs(f - b) / 2
    return ramp * max(longest - w, uneven) + (ramp - 1) * max(0.0, w - longest) / 2


def _dualpipev(ramp: int, times: PassTimes) -> float:
    """Long backwards do not hide behind forwards: they and the weights' part take turns with the other direction's."""
    f, b, w = times.forward, times.backward_input, times.backward_weight
    filling = ramp * max(f, f + b - w) / 2
    return max(filling, ramp * (b - min(b, w) / 2) - f / 2, ramp * (f - (b + w) / 2))


def zero_bubble_time(level: int, *, stages: int, times: PassTimes = EQUAL) -> float:
    """Idle time of the hand-written zero-bubble schedules: H1 `(p-1)(TF+TB-TW)`, H2 `(p-1)(TF+TB-2TW)`."""
    idle = times.forward + times.backward_input - level * times.backward_weight
    return (stages - 1) * max(0.0, idle)


def bubble_over_ideal(schedule: Schedule, *, stages: int, microbatches: int, chunks: int = 1) -> float:
    """Idle time over useful time: `(p-1)/m` for GPipe and 1F1B, `(p-1)/(vm)` interleaved."""
    return bubble_time(schedule, stages=stages, chunks=chunks) / (microbatches * EQUAL.total)


def bubble_share(
    schedule: Schedule,
    *,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    times: PassTimes = EQUAL,
    joined: bool = False,
) -> float:
    """Idle time as a share of the whole step: `(p-1)/(m+p-1)` for GPipe and 1F1B."""
    idle = bubble_time(schedule, stages=stages, chunks=chunks, times=times, joined=joined)
    return idle / (idle + microbatches * times.total)
