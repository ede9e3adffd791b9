"""The order in which each pipeline rank does its passes, for the schedules that fix one."""

from typing import Literal

from lightning_3d.layout import Schedule

Kind = Literal["F", "B", "W"]
Cell = tuple[Kind, int, int]
"""Kind of pass, virtual stage, microbatch."""
V_SCHEDULES = ("zbv_zero_bubble", "dualpipev")
_ALL_FORWARD_FIRST = ("gpipe", "loopedbfs")


def orders(schedule: Schedule, ranks: int, microbatches: int, chunks: int, split: bool) -> list[list[Cell]]:
    """One list of passes per rank; `split` puts the weights' part of each backward `rank` backwards later."""
    return [_order(schedule, rank, ranks, microbatches, chunks, split) for rank in range(ranks)]


def _order(schedule: Schedule, rank: int, ranks: int, microbatches: int, chunks: int, split: bool) -> list[Cell]:
    stages = [rank + chunk * ranks for chunk in range(chunks)]
    group = microbatches if schedule == "loopedbfs" else ranks
    forwards = _rounds(stages, microbatches, group)
    backwards = _rounds(stages[::-1], microbatches, group)
    warm = min(len(forwards), len(forwards) if schedule in _ALL_FORWARD_FIRST else _warm_up(rank, ranks, chunks, split))
    order: list[Cell] = [("F", *cell) for cell in forwards[:warm]]
    for index, cell in enumerate(backwards):
        if warm + index < len(forwards):
            order.append(("F", *forwards[warm + index]))
        order.append(("B", *cell))
        if split and index >= rank:
            order.append(("W", *backwards[index - rank]))
    late = backwards[max(0, len(backwards) - rank) :] if split else []
    return order + [("W", *cell) for cell in late]


def _warm_up(rank: int, ranks: int, chunks: int, split: bool) -> int:
    """Forwards before the first pair of forward and backward; half a backward is back after half the way."""
    after = ranks - 1 - rank
    return after if chunks == 1 else (1 if split else 2) * after + (chunks - 1) * ranks


def _rounds(stages: list[int], microbatches: int, group: int) -> list[tuple[int, int]]:
    """Groups of microbatches, each through every stage of the rank before the next group."""
    return [
        (stage, microbatch)
        for first in range(0, microbatches, group)
        for stage in stages
        for microbatch in range(first, min(first + group, microbatches))
    ]
