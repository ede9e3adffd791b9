"""The cut of a list of costs into consecutive parts. Pure arithmetic: the planner uses it without torch."""

from functools import cache
from itertools import accumulate


@cache
def balanced_cut(costs: tuple[float, ...], parts: int) -> tuple[int, ...]:
    """Bounds of the contiguous partition of `costs` with the smallest largest part; then, the smallest sum of squares.

    A pipeline cuts its units so, and its plan counts their blocks.
    """
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
