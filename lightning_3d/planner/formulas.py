"""Published closed forms: time of a training, elements sent, idle time of a pipeline.

From Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021). Multiply elements by
their bytes.
"""

from lightning_3d.layout import SCHEDULES, PassTimes, Schedule

EQUAL = PassTimes()

RULE_HOURS = 13.3
"""Hours of an A100 80 GB for a billion tokens and a billion parameters, as people quote them."""
A100_PEAK, RULE_SHARE = 312e12, 0.40
"""FLOP/s of an A100 with 16-bit numbers, and the share of it that the rule of thumb takes to be reached."""


def training_seconds(
    *, tokens: float, parameters: float, devices: int, sustained: float, recompute: bool = False
) -> float:
    """`8TP/(nX)` with full recompute, `6TP/(nX)` without: a few percent below the exact FLOPs, which also count
    attention and the head."""
    return (8 if recompute else 6) * tokens * parameters / (devices * sustained)


def ring_all_reduce(elements: float, ranks: int) -> float:
    """Elements that each of `ranks` ranks sends to all-reduce a buffer on a ring: `2(N-1)/N` of it."""
    return 2 * ring_reduce_scatter(elements, ranks)


def ring_reduce_scatter(elements: float, ranks: int) -> float:
    """Elements that each rank sends to reduce-scatter a buffer on a ring: `(N-1)/N` of it; an all-gather the same."""
    return elements * (ranks - 1) / ranks


def powersgd_elements(rows: float, columns: float, rank: int) -> float:
    """Elements that PowerSGD sends in place of a `rows` x `columns` gradient: `(m+n) r`."""
    return (rows + columns) * rank


def bubble_time(
    schedule: Schedule, *, stages: int, chunks: int = 1, times: PassTimes = EQUAL, joined: bool = False
) -> float:
    """Time that a rank idles per step. The number of microbatches does not change it.

    Schedules that halve the backward need as many microbatches as ranks for it. Their formulas give the idle time of
    torch's orders: exact if backward for the inputs takes at least as long as forward, else approximate. `times` are
    those of a rank for one microbatch.

    `joined` is True where ranks wait for the last one before the next step, for example to clip gradients. Without that
    wait, ranks of `zbv_zero_bubble` that begin late end late and lose nothing.
    """
    return SCHEDULES[schedule].idle(stages - 1, chunks, times, joined) if stages > 1 else 0.0


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
