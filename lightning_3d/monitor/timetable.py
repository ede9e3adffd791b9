"""A pipeline's timetable: start and end of each pass on each rank, in the order in which the pipeline runs them.

A plan's prices come from closed forms; a timetable is for drawings.
"""

from collections.abc import Sequence

from lightning_3d.errors import PlannerError
from lightning_3d.layout import PassTimes, Schedule, stage_ranks
from lightning_3d.pipeline.bubble import EQUAL
from lightning_3d.pipeline.pass_clock import Pass
from lightning_3d.pipeline.schedule import Action, actions, stages_per_rank


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
