"""Kinds of pictures as plain data. `png` draws them with matplotlib, `page` with Plotly."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#eeca3b", "#79706e")

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
    """A point of a curve. The label is drawn next to it, the text where it is pointed at."""

    x: float
    y: float
    text: str
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
    text: str


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
    lane_name: str = "pipeline rank"
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
    rows: Mapping[str, tuple[Cell, ...]] = field(default_factory=dict)
    """Name of a row -> its cells. Rows may be of different length."""


Picture = Bars | Curves | Lanes | Cells


def colours(count: int) -> list[str]:
    """Of parts or curves, in their order."""
    return [_COLOURS[index % len(_COLOURS)] for index in range(count)]


def lighter(colour: str, shade: float) -> str:
    """`colour` as `#rrggbb`, on the way to white by half of `shade`."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * (1 - 0.5 * shade)):02x}" for part in parts)
