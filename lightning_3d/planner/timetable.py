"""A pipeline's timetable: start and end of each pass on each rank, from the order of passes and their dependencies.

`bubble` has the closed forms; a timetable has every pass, for drawings and for passes of different lengths. Orders are
not taken from torch's schedule classes, since the planner starts without torch; `test_real_orders` compares them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lightning_3d.errors import PlannerError
from lightning_3d.layout import HALVED_BACKWARD, V_SHAPED, Schedule
from lightning_3d.planner.bubble import EQUAL, PassTimes

Kind = Literal["F", "B", "W"]
Cell = tuple[Kind, int, int]
"""Kind of pass, virtual stage, microbatch."""
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


NEVER = float("inf")


@dataclass(frozen=True, order=True)
class Pass:
    """One pass of one microbatch through one virtual stage: `F`, `B` (the whole backward, or only that for the inputs
    where the schedule puts off the weights' part) or `W`."""

    start: float
    end: float
    rank: int
    stage: int
    microbatch: int
    kind: Kind


@dataclass(frozen=True)
class Timetable:
    """Every pass of one step."""

    passes: tuple[Pass, ...]
    ranks: int

    @property
    def busy(self) -> float:
        """Time that each rank works (all work the same)."""
        return sum(done.end - done.start for done in self.passes) / self.ranks

    @property
    def span(self) -> float:
        """From a rank's first pass to its last, of the rank for which it is longest: a step's share of a long run, as
        ranks that start late in one step start late in the next."""
        return max(self._span(rank) for rank in range(self.ranks))

    @property
    def bubble_share(self) -> float:
        """Idle time as a share of the step."""
        return 1 - self.busy / self.span

    def held(self, rank: int) -> int:
        """Most virtual stages' activations that `rank` has at once."""
        own = [done for done in self.passes if done.rank == rank]
        release = "W" if any(done.kind == "W" for done in own) else "B"
        changes = [(done.start, 1) for done in own if done.kind == "F"]
        changes += [(done.end, -1) for done in own if done.kind == release]
        held = most = 0
        for _, change in sorted(changes):
            held += change
            most = max(most, held)
        return most

    def _span(self, rank: int) -> float:
        own = [done for done in self.passes if done.rank == rank]
        return max(done.end for done in own) - min(done.start for done in own)


def timetable(
    schedule: Schedule, *, stages: int, microbatches: int, chunks: int = 1, times: PassTimes = EQUAL
) -> Timetable:
    """Play one step of `microbatches` over `stages` ranks of `chunks` virtual stages each."""
    if microbatches < 1 or stages < 1:
        raise PlannerError(f"a pipeline of {stages} ranks and {microbatches} microbatches has no timetable.")
    if schedule in V_SHAPED and chunks != 2:
        raise PlannerError(f"{schedule} has 2 stages per rank, not {chunks}.")
    play = _Play(stages * chunks - 1, _costs(schedule, chunks, times), stages)
    if schedule in V_SHAPED:
        play.greedily(microbatches)
    else:
        halved = schedule in HALVED_BACKWARD
        play.in_order([list(order) for order in orders(schedule, stages, microbatches, chunks, halved)])
    return Timetable(tuple(sorted(play.passes)), stages)


def _costs(schedule: Schedule, chunks: int, times: PassTimes) -> dict[Kind, float]:
    backward = times.backward_input + (0 if schedule in HALVED_BACKWARD else times.backward_weight)
    return {"F": times.forward / chunks, "B": backward / chunks, "W": times.backward_weight / chunks}


class _Play:
    """The passes played so far, and the time when each rank is free."""

    def __init__(self, last: int, cost: dict[Kind, float], ranks: int) -> None:
        self.last, self.cost, self.ranks = last, cost, ranks
        self.done: dict[Cell, float] = {}
        self.free = [0.0] * ranks
        self.passes: list[Pass] = []

    def in_order(self, queues: list[list[Cell]]) -> None:
        """Every rank does its queue in order."""
        while any(queues):
            start, rank = min(
                (max(self.free[rank], self.ready(queue[0])), rank) for rank, queue in enumerate(queues) if queue
            )
            self._play(rank, start, queues[rank].pop(0))

    def greedily(self, microbatches: int) -> None:
        """The V schedules: a free rank does what is ready, backwards first, weights last, and starts a forward only
        while it keeps fewer than `2p` activations."""
        waiting = [set(self._cells_of(rank, microbatches)) for rank in range(self.ranks)]
        held = [0] * self.ranks
        while any(waiting):
            choices = [(*self._best(waiting[rank], rank, held[rank]), rank) for rank in range(self.ranks)]
            start, _, cell, rank = min(choices)
            assert start < NEVER, "some pass is always ready"
            self._play(rank, start, cell)
            waiting[rank].remove(cell)
            held[rank] += {"F": 1, "B": 0, "W": -1}[cell[0]]

    def ready(self, cell: Cell) -> float:
        """The end of the passes that `cell` waits for; `NEVER` if one of them has not been played."""
        kind, stage, microbatch = cell
        if kind == "F":
            return 0.0 if stage == 0 else self.done.get(("F", stage - 1, microbatch), NEVER)
        own = self.done.get(("F" if kind == "B" else "B", stage, microbatch), NEVER)
        if kind == "W" or stage == self.last:
            return own
        return max(own, self.done.get(("B", stage + 1, microbatch), NEVER))

    def _best(self, cells: Iterable[Cell], rank: int, held: int) -> tuple[float, tuple[int, int, int], Cell]:
        full = held >= 2 * self.ranks
        nothing: tuple[float, tuple[int, int, int], Cell] = (NEVER, (0, 0, 0), ("F", 0, 0))
        able = (cell for cell in cells if not (full and cell[0] == "F"))
        return min(((max(self.free[rank], self.ready(cell)), _urgency(cell), cell) for cell in able), default=nothing)

    def _cells_of(self, rank: int, microbatches: int) -> Iterable[Cell]:
        kinds: tuple[Kind, ...] = ("F", "B", "W")
        both = (rank, self.last - rank)
        return ((kind, stage, microbatch) for kind in kinds for stage in both for microbatch in range(microbatches))

    def _play(self, rank: int, start: float, cell: Cell) -> None:
        kind, stage, microbatch = cell
        end = start + self.cost[kind]
        self.done[cell] = self.free[rank] = end
        self.passes.append(Pass(start, end, rank, stage, microbatch, kind))


def _urgency(cell: Cell) -> tuple[int, int, int]:
    """Backwards, then forwards on their way back, then new forwards, then weights; older microbatches first."""
    kind, stage, microbatch = cell
    return ({"B": 0, "F": 1, "W": 2}[kind], -stage if kind == "F" else 0, microbatch)
