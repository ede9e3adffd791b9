"""Integers among a step's attributes: whether it adds to them or sets them, and what several microbatches make of it.

The value does not tell: 4 that became 6 may be two samples more, or the length of this batch's texts. So an integer
that a step is known to change is lent to it as one that stays a `Tally` when something is added to it.
"""

from typing import Any

import numpy as np
from torch import Tensor

from lightning_3d.sandbox.trees import map_leaves

Path = tuple[Any, ...]
"""The attribute's name, then keys of dicts."""


class Tally(int):
    """What a step was lent at `path`, and what comes of adding to it."""

    path: Path

    @classmethod
    def of(cls, value: int, path: Path) -> "Tally":
        tally = cls(value)
        tally.path = path
        return tally

    def __add__(self, other: Any) -> Any:
        return self._moved(int.__add__(self, other))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._moved(int.__sub__(self, other))

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def _moved(self, result: Any) -> Any:
        return Tally.of(result, self.path) if isinstance(result, int) else result  # else NotImplemented


def exact(value: Any) -> Any:
    """`value` with plain integers."""
    return map_leaves(lambda leaf: int(leaf) if type(leaf) is Tally else leaf, value)


class Counts:
    """What is known of integers from step to step."""

    def __init__(self) -> None:
        self.changing: set[Path] = set()
        self.uneven: set[Path] = set()
        """Of which microbatches made something else each, at some time: they count what they find in the data."""

    def told(self, path: Path, before: Any, value: Any, lent: bool) -> tuple[str, Any] | None:
        """What was done where `value` is now: "set", of an integer that was lent "add" or "put", None for nothing."""
        if type(value) is Tally and value.path == path:
            return ("add", int(value) - before) if value != before else None
        if type(exact(value)) is not int:
            return "set", value
        self.changing.add(path)
        return "put" if lent else "set", int(value)

    def look(self, kind: str, path: Path, values: list[int], everywhere: bool) -> None:
        """Note what is uneven, of all integers before any is joined."""
        same = set(values) == {1} if kind == "add" else len(set(values)) == 1
        inside = len(path) > 1 or kind == "add"
        if not same or (inside and not everywhere):
            self.uneven.add(_group(path))

    def joined(self, path: Path, values: list[int]) -> int:
        """What a whole batch adds or puts, where microbatches add or put `values`."""
        return sum(values) if _group(path) in self.uneven else values[0]


def _group(path: Path) -> Path:
    """Classes are counted each under its own number, in one dict."""
    return path if isinstance(path[-1], str) else path[:-1]


def is_count(value: Any) -> bool:
    """Whether it is a whole number, of any kind."""
    if isinstance(value, Tensor):
        return not value.ndim and not value.is_floating_point() and not value.is_complex()
    return isinstance(value, int | np.integer) and type(value) is not bool
