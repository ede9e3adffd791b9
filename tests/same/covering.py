"""Few cases out of a product of choices, such that every pair of choices that can occur together does."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def every(choices: Mapping[str, Sequence[Any]], possible: Callable[[Case], bool]) -> list[Case]:
    """All cases that are `possible`."""
    cases = (dict(zip(choices, values, strict=True)) for values in product(*choices.values()))
    return [case for case in cases if possible(case)]


def covering(cases: Sequence[Case]) -> list[Case]:
    """Cases that together hold every pair of choices that any of `cases` holds; greedily few, always the same."""
    missing = {pair: None for case in cases for pair in _pairs(case)}
    chosen: list[Case] = []
    while missing:
        best = max(cases, key=lambda case: (sum(pair in missing for pair in _pairs(case)), _draw(case)))
        chosen.append(best)
        for pair in _pairs(best):
            missing.pop(pair, None)
    return chosen


def _draw(case: Case) -> int:
    """Among equals, no choice is preferred: the last cases would otherwise all take the first one of everything."""
    return zlib.crc32(repr(case).encode())


def _pairs(case: Case) -> Iterator[Pair]:
    yield from combinations(case.items(), 2)  # type: ignore[misc]
