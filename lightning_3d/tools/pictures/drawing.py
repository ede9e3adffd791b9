"""Pictures as PNG files and as SVG, drawn by matplotlib (the `plots` extra)."""

from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from lightning_3d.errors import ConfigurationError
from lightning_3d.tools.pictures.kinds import SPANS, Bars, Cells, Curves, Lanes, Picture

WIDTH, DPI = 10.0, 120
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#9d755d", "#eeca3b", "#79706e")
ROW = 0.3
"""Inches of a bar, with the space to the next one."""
AROUND = 1.4
"""Inches of a title and an axis."""
NEAR = 30
"""Pixels between two labels of points: a label that is nearer to an earlier one is left out."""


def save_png(file: Path, pictures: Sequence[Picture], *, side_by_side: bool = False) -> Path:
    """Draw `pictures` below one another, or side by side with the labels of the first. Return `file`."""
    drawn, content = _drawn(pictures, "--plot", side_by_side=side_by_side), BytesIO()
    drawn.savefig(content, dpi=DPI, format="png")
    return written(file, content.getvalue())


def written(file: Path, content: bytes) -> Path:
    """Write `content` to `file`, whose folder need not exist, and return it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be written: {error.strerror}. Give another path.") from error
    return file


def svg(picture: Picture) -> bytes:
    """`picture` as SVG, its text as text."""
    drawn, file = _drawn([picture], "--html"), BytesIO()
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):
        drawn.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def _drawn(pictures: Sequence[Picture], flag: str, *, side_by_side: bool = False) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigurationError(f'{flag} needs matplotlib: pip install "lightning-3d[plots]".') from None
    heights = [_height(picture) for picture in pictures]
    size = (WIDTH * 1.3, max(heights)) if side_by_side else (WIDTH, sum(heights))
    figure = Figure(figsize=size, layout="constrained")
    if side_by_side:
        places = figure.subplots(1, len(pictures), sharey=True, squeeze=False)[0]
    else:
        places = figure.subplots(len(pictures), 1, height_ratios=heights, squeeze=False)[:, 0]
    for picture, axes in zip(pictures, places, strict=True):
        axes.set_title(_plain(picture.title), loc="left", fontsize="medium", wrap=True)
        _DRAWN[type(picture)](picture, axes)
    return figure


def _height(picture: Picture) -> float:
    if isinstance(picture, Bars):
        return AROUND + ROW * max(3, len(picture.labels))
    if isinstance(picture, Lanes):
        return AROUND + max(0.09, ROW - 0.004 * picture.lanes) * max(3, picture.lanes)
    return AROUND + 1.7 * ROW * len(picture.rows) if isinstance(picture, Cells) else 4.5


def _bars(picture: Bars, axes: Any) -> None:
    rows, shades = range(len(picture.labels)), _colours(len(picture.parts))
    if picture.from_zero:
        left = [0.0] * len(picture.labels)
        for (name, sizes), colour in zip(picture.parts.items(), shades, strict=True):
            axes.barh(rows, [size or 0.0 for size in sizes], left=left, label=name, color=colour)
            left = [start + (size or 0.0) for start, size in zip(left, sizes, strict=True)]
        most = max([*left, picture.limit or 0.0, 1e-9])
        room = 0.16 * axes.get_gridspec().ncols  # for the totals, as a share of the axis
        for row, text in zip(rows, picture.totals, strict=False):
            axes.annotate(_plain(text), ((0.98 + room) * most, row), va="center", ha="right", fontsize="small")
        axes.set_xlim(0, (1 + room) * most)
    else:
        for (name, sizes), colour in zip(picture.parts.items(), shades, strict=True):
            known = [(size, row) for row, size in zip(rows, sizes, strict=True) if size is not None]
            axes.plot([size for size, _ in known], [row for _, row in known], "o", label=name, color=colour)
        axes.grid(axis="both", alpha=0.3)
        axes.margins(x=0.15)
    if picture.limit is not None:
        axes.axvline(picture.limit, color="black", linestyle="--", label=picture.limit_name)
    axes.set_yticks(rows, [_plain(label) for label in picture.labels], fontsize="small")
    axes.set_ylim(len(picture.labels) - 0.5, -0.5)
    _axis(axes.xaxis, picture.unit)
    _legend(axes, len(picture.parts) > 1 or picture.limit is not None)


def _curves(picture: Curves, axes: Any) -> None:
    for (name, own), colour in zip(picture.curves.items(), _colours(len(picture.curves)), strict=True):
        line = "-o" if picture.joined else "o"
        axes.plot([p.x for p in own], [p.y for p in own], line, label=_plain(name), color=colour)
    for value, line in ((picture.deadline, axes.axvline), (picture.budget, axes.axhline)):
        if value is not None:
            line(value[0], color="black", linestyle="--", label=_plain(value[1]))
    points = [point for own in picture.curves.values() for point in own]
    rightmost = max([*(point.x for point in points), *([picture.deadline[0]] if picture.deadline else [])])
    highest = max([*(point.y for point in points), *([picture.budget[0]] if picture.budget else [])])
    axes.set_xlim(0, 1.15 * rightmost or 1.0)
    axes.set_ylim(0, 1.15 * highest or 1.0)
    axes.grid(alpha=0.3)
    _axis(axes.xaxis, picture.x)
    _axis(axes.yaxis, picture.y)
    _legend(axes, True)
    taken: list[tuple[float, float]] = []
    for point in points:
        x, y = axes.transData.transform((point.x, point.y))
        if all(abs(x - other[0]) > NEAR or abs(y - other[1]) > NEAR / 2 for other in taken):
            taken.append((x, y))
            axes.annotate(
                _plain(point.label), (point.x, point.y), xytext=(4, 4), textcoords="offset points", fontsize="small"
            )


def _lanes(picture: Lanes, axes: Any) -> None:
    from matplotlib.patches import Patch

    lines = 0.4 if len(picture.spans) < 1000 else 0.0  # a white line around a span of few pixels would be all of it
    for kind, (_, colour) in SPANS.items():
        own = [span for span in picture.spans if span.kind == kind]
        for lane in sorted({span.lane for span in own}):
            here = [span for span in own if span.lane == lane]
            axes.broken_barh(
                [(span.start, span.end - span.start) for span in here],
                (lane - 0.42, 0.84),
                facecolors=[_lighter(colour, span.shade) for span in here],
                edgecolor="white",
                linewidth=lines,
            )
    every = max(1, picture.lanes // 16)
    axes.set_yticks(range(0, picture.lanes, every))
    axes.set_ylim(picture.lanes - 0.5, -0.5)
    axes.set_xlim(0, picture.end)
    axes.set_ylabel("pipeline rank")
    _axis(axes.xaxis, picture.unit)
    present = dict.fromkeys(SPANS[span.kind] for span in picture.spans)
    patches = [Patch(color=colour, label=name) for name, colour in present]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.01, 1), fontsize="small")


def _cells(picture: Cells, axes: Any) -> None:
    from matplotlib import colormaps

    cells = [cell for row in picture.rows.values() for cell in row]
    most, blues = max(cell.value for cell in cells) or 1.0, colormaps["Blues"]
    widest = max(len(row) for row in picture.rows.values())
    for at, row in enumerate(picture.rows.values()):
        for column, cell in enumerate(row):
            shade = 0.05 + 0.4 * cell.value / most
            axes.barh(at, 0.94, left=column, height=0.9, color=blues(shade))
            axes.text(column + 0.47, at - 0.15, _plain(cell.name), ha="center", va="center", fontsize=8)
            axes.text(column + 0.47, at + 0.22, _plain(cell.text), ha="center", va="center", fontsize=6)
    axes.set_yticks(range(len(picture.rows)), [_plain(name) for name in picture.rows], fontsize="small")
    axes.set_ylim(len(picture.rows) - 0.5, -0.5)
    axes.set_xlim(0, max(widest, 4))
    axes.set_xticks([])
    axes.set_xlabel(f"colour: {picture.unit}")
    axes.spines[:].set_visible(False)


_DRAWN: dict[type, Callable[[Any, Any], None]] = {Bars: _bars, Curves: _curves, Lanes: _lanes, Cells: _cells}


def _axis(axis: Any, name: str) -> None:
    """A name, and complete numbers: matplotlib would write `1e6` over the axis."""
    axis.set_label_text(_plain(name))
    axis.set_major_formatter(lambda value, _: f"{value:,.10g}")


def _legend(axes: Any, needed: bool) -> None:
    """To the right of the picture, where it covers nothing."""
    if needed:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize="small")


def _plain(text: str) -> str:
    """`text` as it is: matplotlib reads what stands between two dollars as a formula."""
    return text.replace("$", r"\$")


def _colours(count: int) -> list[str]:
    """Of parts or curves, in their order."""
    return [_COLOURS[index % len(_COLOURS)] for index in range(count)]


def _lighter(colour: str, shade: float) -> str:
    """`colour` as `#rrggbb`, on the way to white by half of `shade`."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(255 - (255 - part) * (1 - 0.5 * shade)):02x}" for part in parts)
