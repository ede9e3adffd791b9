"""Timetables of a pipeline, and pictures of them: a plan's, or a recorded one beside the ideal one.

The ideal one has the same work in equal passes, without messages. A plan's prices come from closed forms instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_3d.errors import PlannerError
from lightning_3d.layout import PassTimes, Schedule, stage_ranks
from lightning_3d.module.amounts import show_seconds
from lightning_3d.pipeline.pass_clock import Pass
from lightning_3d.pipeline.schedule import Action, actions, stages_per_rank
from lightning_3d.pipeline.stage_costs import EQUAL
from lightning_3d.tools.pictures.kinds import Lanes, Span
from lightning_3d.tools.pictures.page import TableCell


def timetable(
    schedule: Schedule,
    *,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    times: PassTimes = EQUAL,
    orders: Sequence[Sequence[Action]] | None = None,
) -> list[Pass]:
    """Every pass of one step, each begun as soon as its rank and the passes that it waits for allow.

    `orders` has the passes of each rank in the order in which a run had them, where that is known.
    """
    if microbatches < 1 or stages < 1:
        raise PlannerError(f"a pipeline of {stages} ranks and {microbatches} microbatches has no timetable.")
    chunks = stages_per_rank(schedule, chunks)
    cost = {"F": times.forward, "I": times.backward_input, "W": times.backward_weight}
    cost["B"] = times.backward_input + times.backward_weight
    last = len(stage_ranks(schedule, stages, chunks)) - 1
    orders = orders or actions(schedule, schedule, stages, chunks, microbatches)
    waiting = [[action for action in order if action.kind in cost] for order in orders]
    free, passes = [0.0] * stages, []
    ends: dict[tuple[str, int, int], float] = {}
    while any(waiting):
        able = [rank for rank in range(stages) if waiting[rank] and _needs(waiting[rank][0], last) <= ends.keys()]
        if not able:
            raise PlannerError("the passes of the pipeline wait for each other in a circle: no run has that order.")
        for rank in able:
            kind, stage, microbatch = action = waiting[rank].pop(0)
            start = max([free[rank], *(ends[need] for need in _needs(action, last))])
            free[rank] = start + cost[kind] / chunks
            ends["I" if kind == "B" else kind, stage, microbatch] = free[rank]
            passes.append(Pass(start, free[rank], rank, stage, microbatch, kind))
    return passes


def _needs(action: Action, last: int) -> set[tuple[str, int, int]]:
    kind, stage, microbatch = action
    before = {"F": [("F", stage - 1)], "W": [("I", stage)]}.get(kind, [("F", stage), ("I", stage + 1)])
    return {(name, index, microbatch) for name, index in before if 0 <= index <= last}


HEADER = ("rank", "busy", "idle", "share", "ideal share")


@dataclass(frozen=True, kw_only=True)
class Timelines:
    name: str
    ranks: int
    recorded: Sequence[Pass]
    ideal: Sequence[Pass]

    def rows(self) -> list[tuple[TableCell, ...]]:
        """A row of the table for each rank, below `HEADER`."""
        rows: list[tuple[TableCell, ...]] = []
        for rank in range(self.ranks):
            length, works = most_seconds(self.recorded), busy(self.recorded, rank)
            times = [TableCell(show_seconds(each), each) for each in (works, length - works)]
            idle = (1 - works / length, 1 - busy(self.ideal, rank) / most_seconds(self.ideal))
            rows.append((TableCell(str(rank), rank), *times, *[TableCell(f"{share:.1%}", share) for share in idle]))
        return rows

    def lines(self) -> tuple[str, str]:
        """A title for each of the two."""
        return (
            f"{self.name}, recorded: {show_seconds(most_seconds(self.recorded))}, idle {self._idle(self.recorded):.1%}",
            f"Ideal (the same work in equal passes, no messages): {show_seconds(most_seconds(self.ideal))},"
            f" idle {self._idle(self.ideal):.1%}",
        )

    def pictures(self) -> list[Lanes]:
        factor, unit = scale(most_seconds(self.recorded))
        end = max(most_seconds(self.recorded), most_seconds(self.ideal)) * factor
        return [
            Lanes(title=title, unit=unit, spans=pass_spans(passes, self.ranks, factor), lanes=self.ranks, end=end)
            for title, passes in zip(self.lines(), (self.recorded, self.ideal), strict=True)
        ]

    def _idle(self, passes: Sequence[Pass]) -> float:
        used = sum(done.end - done.start for done in passes)
        return 1 - used / (self.ranks * most_seconds(passes))


def timelines(
    schedule: Schedule, *, ranks: int, chunks: int, microbatches: int, recorded: Sequence[Pass], name: str
) -> Timelines:
    ideal = timetable(
        schedule,
        stages=ranks,
        microbatches=microbatches,
        chunks=chunks,
        times=_mean_times(recorded, ranks * microbatches),
        orders=[_order(recorded, rank) for rank in range(ranks)],
    )
    return Timelines(name=name, ranks=ranks, recorded=recorded, ideal=ideal)


def _order(passes: Sequence[Pass], rank: int) -> list[Action]:
    """The passes of `rank` as they ran. (To have torch compute its order again takes minutes for large schedules.)"""
    own = sorted(done for done in passes if done.rank == rank and done.kind != "H")
    return [Action(done.kind, done.stage, done.microbatch) for done in own]


def busy(passes: Sequence[Pass], rank: int) -> float:
    return sum(done.end - done.start for done in passes if done.rank == rank)


def _mean_times(passes: Sequence[Pass], count: int) -> PassTimes:
    """Seconds of a rank for a microbatch, if all had the same share of the work. A head counts as forward."""
    total = dict.fromkeys("FBIWH", 0.0)
    for done in passes:
        total[done.kind] += done.end - done.start
    return PassTimes(
        forward=(total["F"] + total["H"]) / count,
        backward_input=(total["I"] + total["B"] / 2) / count,
        backward_weight=(total["W"] + total["B"] / 2) / count,
    )


def pass_spans(passes: Sequence[Pass], ranks: int, factor: float = 1.0) -> tuple[Span, ...]:
    """A span for each pass, its seconds times `factor`. Later virtual stages of a rank are lighter."""
    chunks = max(done.stage for done in passes) // ranks
    return tuple(
        Span(done.start * factor, done.end * factor, done.rank, done.kind, done.stage // ranks / max(1, chunks))
        for done in passes
    )


def most_seconds(passes: Sequence[Pass]) -> float:
    return max(done.end for done in passes)


def scale(seconds: float) -> tuple[float, str]:
    """Factor and name of the unit in which `seconds` is a number of few digits."""
    return (1.0, "seconds") if seconds >= 1 else (1e3, "milliseconds")
