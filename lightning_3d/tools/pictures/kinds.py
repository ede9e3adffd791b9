"""Kinds of pictures as plain data, which `drawing` draws."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

TIMES = (0.25, 0.5, 1, 2, 4)
"""A batch, a sequence or a price is also priced at so many times its size."""


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Horizontal bars, one for each label, stacked from parts."""

    title: str
    unit: str
    labels: tuple[str, ...]
    parts: Mapping[str, tuple[float | None, ...]]
    """Name of a part -> its size in each bar, None where there is no number."""
    totals: tuple[str, ...] = ()
    """Text at the end of each bar."""
    limit: float | None = None
    limit_name: str = ""
    from_zero: bool = True
    """False for numbers whose distance from 0 says nothing, such as a loss: they are points."""


class Point(NamedTuple):
    """A point of a curve. The label is drawn next to it."""

    x: float
    y: float
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Points of y against x, joined for each name."""

    title: str
    x: str
    y: str
    curves: Mapping[str, tuple[Point, ...]]
    deadline: tuple[float, str] | None = None
    """An x that must not be passed, and its name."""
    budget: tuple[float, str] | None = None
    """The same for y."""
    joined: bool = True


class Span(NamedTuple):
    """One piece of work on a lane."""

    start: float
    end: float
    lane: int
    kind: str
    shade: float
    """0 to 1: later virtual stages are lighter."""


SPANS = {
    "F": ("forward", "#4c78a8"),
    "B": ("backward", "#f58518"),
    "I": ("backward for inputs", "#f58518"),
    "W": ("backward for weights", "#54a24b"),
    "H": ("head and loss on the full batch", "#b279a2"),
}
"""Kind of a span -> its name and colour."""


@dataclass(frozen=True, kw_only=True)
class Lanes:
    title: str
    unit: str
    spans: tuple[Span, ...]
    lanes: int
    end: float | None = None
    """Right end of the time axis, where two pictures are to be compared."""


class Cell(NamedTuple):
    """One rank: its number and the text below it."""

    value: float
    name: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Cells:
    title: str
    unit: str
    rows: Mapping[str, tuple[Cell, ...]]
    """Name of a row -> its cells. Rows may be of different length."""


Picture = Bars | Curves | Lanes | Cells
