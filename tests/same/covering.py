"""Few cases out of a product of choices, such that every group of choices that can occur together does."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]
Group = tuple[tuple[str, Any], ...]
TRIES = 30
"""Random cases for each group that is missing. A group that none of them makes possible is left out."""


def covering(choices: Mapping[str, Sequence[Any]], possible: Callable[[Case], bool], of: int = 2) -> list[Case]:
    """Possible cases that together hold each possible group of `of` choices; greedily few, always the same.

    The product may be too large to look at: cases are drawn at random around a group that is still missing.
    """
    draw = random.Random(0)
    missing = dict.fromkeys(_groups_of_all(choices, of))
    chosen: list[Case] = []
    while missing:
        group = next(iter(missing))
        drawn = (_drawn(choices, dict(group), draw) for _ in range(TRIES))
        found = [case for case in drawn if possible(case)]
        if not found:
            missing.pop(group)
            continue
        best = max(found, key=lambda case: sum(held in missing for held in _groups(case, of)))
        chosen.append(best)
        for held in _groups(best, of):
            missing.pop(held, None)
    return chosen


def _drawn(choices: Mapping[str, Sequence[Any]], fixed: Case, draw: random.Random) -> Case:
    return {name: fixed[name] if name in fixed else draw.choice(values) for name, values in choices.items()}


def _groups(case: Case, of: int) -> Iterator[Group]:
    yield from combinations(case.items(), of)


def _groups_of_all(choices: Mapping[str, Sequence[Any]], of: int) -> Iterator[Group]:
    for names in combinations(choices, of):
        for values in product(*(choices[name] for name in names)):
            yield tuple(zip(names, values, strict=True))
