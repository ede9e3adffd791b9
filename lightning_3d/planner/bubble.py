"""How long a pipeline idles, in closed form per schedule.

Times are those of one rank's whole share of a microbatch: forward, backward for the inputs, backward for the weights.
From the papers on GPipe, PipeDream-Flush (1F1B), interleaving (Narayanan et al. 2021), breadth-first pipelines
(Lamy-Poirier 2022), zero bubble (Qi et al. 2023, 2024) and DualPipe (DeepSeek 2024).
"""

from dataclasses import dataclass

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


def bubble_time(schedule: Schedule, *, stages: int, chunks: int = 1, times: PassTimes = EQUAL) -> float:
    """Time that a rank idles per step. It does not depend on the number of microbatches.

    ZBV idles nowhere when the three passes take equally long. When they do not, the longest cannot be hidden behind
    the others: `(p-1)` times three times what it is above their mean is our own estimate, close to `timetable`.
    """
    f, b, w = times.forward, times.backward_input, times.backward_weight
    ramp = stages - 1
    if schedule in ("gpipe", "1f1b"):
        return ramp * times.total
    if schedule in ("interleaved_1f1b", "loopedbfs"):
        return ramp * times.total / chunks
    if schedule == "interleaved_zero_bubble":
        return ramp * max(0.0, f + b - w) / chunks
    if schedule == "dualpipev":
        return ramp * max(0.0, f + 2 * b - w) / 2
    return ramp * (3 * max(f, b, w) - times.total)


def zero_bubble_time(level: int, *, stages: int, times: PassTimes = EQUAL) -> float:
    """Idle time of the hand-written zero-bubble schedules: H1 `(p-1)(TF+TB-TW)`, H2 `(p-1)(TF+TB-2TW)`."""
    idle = times.forward + times.backward_input - level * times.backward_weight
    return (stages - 1) * max(0.0, idle)


def bubble_over_ideal(schedule: Schedule, *, stages: int, microbatches: int, chunks: int = 1) -> float:
    """Idle time over useful time: `(p-1)/m` for GPipe and 1F1B, `(p-1)/(vm)` interleaved."""
    return bubble_time(schedule, stages=stages, chunks=chunks) / (microbatches * EQUAL.total)


def bubble_share(
    schedule: Schedule, *, stages: int, microbatches: int, chunks: int = 1, times: PassTimes = EQUAL
) -> float:
    """Idle time as a share of the whole step: `(p-1)/(m+p-1)` for GPipe and 1F1B."""
    idle = bubble_time(schedule, stages=stages, chunks=chunks, times=times)
    return idle / (idle + microbatches * times.total)
