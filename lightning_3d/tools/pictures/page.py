"""Pictures and tables on one page of HTML that needs no other file and no network (Plotly, of the `plots` extra).

Names on a page come from modules, runs and files of others. They are escaped, and the page's policy runs its own two
scripts alone: those with their checksums.
"""

import json
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from lightning_3d.errors import ConfigurationError
from lightning_3d.tools.pictures.kinds import SPANS, Bars, Cells, Curves, Lanes, Picture, colours, lighter


class TableCell(NamedTuple):
    """Text, and the number that sorts it; without one the text does."""

    text: str
    key: float | None = None


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table that a click on a column's name sorts."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[TableCell, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Words:
    title: str
    lines: tuple[str, ...]


Part = Table | Words | Picture


def save_page(file: Path, title: str, parts: Sequence[Part]) -> Path:
    """Write `parts` below one another to `file`, and return it."""
    script = _plotly()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(page(title, parts, script), encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be written: {error.strerror}. Give another path.") from error
    return file


def page(title: str, parts: Sequence[Part], library: str) -> str:
    """The text of the page, with the script of Plotly in it."""
    figures = [figure(part) for part in parts if not isinstance(part, Table | Words)]
    scripts, style = [library, _beside("page.js")], _beside("page.css")
    allowed = " ".join(f"'sha256-{b64encode(sha256(each.encode()).digest()).decode()}'" for each in scripts)
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:"
    data = json.dumps(figures, allow_nan=False).replace("<", "\\u003c")
    sections, number = [], 0
    for part in parts:
        if isinstance(part, Table | Words):
            sections.append(_table(part) if isinstance(part, Table) else _words(part))
        else:
            labels = isinstance(part, Curves) and any(p.label for points in part.curves.values() for p in points)
            size = "half picture" if isinstance(part, Curves) and not labels else "picture"
            sections.append(f'<div class="{size}" id="picture{number}"></div>')
            number += 1
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{escape(title)}</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n" + "\n".join(sections) + "\n"
        f'<script type="application/json" id="figures">{data}</script>\n'
        + "\n".join(f"<script>{each}</script>" for each in scripts)
        + "\n</body>\n</html>\n"
    )


def figure(picture: Picture) -> dict[str, Any]:
    """`picture` as Plotly's data and layout."""
    data, layout = _FIGURES[type(picture)](picture)
    usual = {
        "title": {"text": escape(picture.title), "x": 0, "xref": "paper", "font": {"size": 16}},
        "template": {"layout": {"plot_bgcolor": "#fff", "colorway": colours(9)}},
        "margin": {"l": 80, "r": 40, "t": 60, "b": 60},
        "hovermode": "closest",
        "legend": {"x": 1.01, "y": 1, "traceorder": "normal"},
    }
    return {"data": data, "layout": {**usual, **layout}}


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ConfigurationError('--html needs plotly: pip install "lightning-3d[plots]".') from None
    return str(get_plotlyjs())


def _bars(picture: Bars) -> tuple[list[Any], dict[str, Any]]:
    rows = list(range(len(picture.labels)))
    height = max(40 + 30 * max(3, len(rows)), 25 * len(picture.parts))
    data: list[Any] = [
        {
            "type": "bar" if picture.from_zero else "scatter",
            **({"orientation": "h"} if picture.from_zero else {"mode": "markers"}),
            "name": escape(name),
            "x": list(sizes),
            "y": rows,
            **({"width": min(0.8, 45 * len(rows) / height)} if picture.from_zero else {}),
            "marker": {"color": colour},
            "hovertemplate": f"{escape(name)}: %{{x:,.4~g}} {escape(picture.unit)}<extra></extra>",
        }
        for (name, sizes), colour in zip(picture.parts.items(), colours(len(picture.parts)), strict=True)
    ]
    ends = [sum(size or 0.0 for size in sizes) for sizes in zip(*picture.parts.values(), strict=True)]
    most = max([*ends, picture.limit or 0.0, 1e-9])
    if picture.totals:
        texts = [escape(text) for text in picture.totals]
        place = {"x": [1.14 * most] * len(rows), "y": rows, "textposition": "middle left"}
        data.append(
            {"type": "scatter", "mode": "text", **place, "text": texts, "showlegend": False, "hoverinfo": "skip"}
        )
    labels = {"tickvals": rows, "ticktext": [escape(label) for label in picture.labels], "automargin": True}
    labels |= {"zeroline": False, "ticks": "outside", "tickcolor": "#fff"}  # a gap before the bars
    layout: dict[str, Any] = {
        "barmode": "stack",
        "height": 120 + height,
        "xaxis": _axis(picture.unit),
        "yaxis": {**labels, "range": [len(rows) - 0.5, -0.5]},
        "showlegend": len(picture.parts) > 1,
    }
    if picture.from_zero:
        layout["xaxis"]["range"] = [0, 1.16 * most]
    if picture.limit is not None:
        layout |= _lines(x=(picture.limit, picture.limit_name))
    return data, layout


def _curves(picture: Curves) -> tuple[list[Any], dict[str, Any]]:
    data = [
        {
            "type": "scatter",
            "mode": ("lines+" if picture.joined else "") + "markers+text",
            "textposition": "top right",
            "name": escape(name),
            "x": [point.x for point in points],
            "y": [point.y for point in points],
            "text": [escape(point.label) for point in points],
            "hovertext": [escape(point.text) for point in points],
            "hovertemplate": "%{hovertext}<br>%{x:,.5~g}: %{y:,.5~g}<extra></extra>",
        }
        for name, points in picture.curves.items()
    ]
    axes = {"xaxis": {**_axis(picture.x), "rangemode": "tozero"}, "yaxis": {**_axis(picture.y), "rangemode": "tozero"}}
    return data, {"height": 420, **axes, "showlegend": True, **_lines(picture.deadline, picture.budget)}


def _lanes(picture: Lanes) -> tuple[list[Any], dict[str, Any]]:
    data = []
    line = {"width": 0.5 if len(picture.spans) < 1000 else 0, "color": "#fff"}
    for kind, (name, colour) in SPANS.items():
        own = [span for span in picture.spans if span.kind == kind]
        if own:
            data.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": name,
                    "base": [span.start for span in own],
                    "x": [span.end - span.start for span in own],
                    "y": [span.lane for span in own],
                    "width": 0.84,
                    "marker": {"color": [lighter(colour, span.shade) for span in own], "line": line},
                    "text": [escape(span.text) for span in own],
                    "textposition": "none",
                    "hovertemplate": f"%{{text}}<br>%{{base:,.5~g}}, for %{{x:,.4~g}} {escape(picture.unit)}"
                    "<extra></extra>",
                }
            )
    ranks = {
        "title": {"text": picture.lane_name},
        "range": [picture.lanes - 0.5, -0.5],
        "dtick": picture.lanes // 16 + 1,
    }
    times = _axis(picture.unit)
    if picture.end is not None:
        times["range"] = [0, picture.end]
    height = 170 + max(12, 32 - picture.lanes // 3) * max(3, picture.lanes)
    return data, {"barmode": "overlay", "height": height, "xaxis": times, "yaxis": ranks, "showlegend": True}


def _cells(picture: Cells) -> tuple[list[Any], dict[str, Any]]:
    rows, widest = list(picture.rows.values()), max(len(row) for row in picture.rows.values())
    filled = [[*row, *[None] * (widest - len(row))] for row in rows]
    heat = {
        "type": "heatmap",
        "z": [[None if cell is None else cell.value for cell in row] for row in filled],
        "zmin": 0,
        "zmax": max(cell.value for row in rows for cell in row) or 1,
        "text": [
            ["" if cell is None else f"{escape(cell.name)}<br>{escape(cell.text)}" for cell in row] for row in filled
        ],
        "texttemplate": "%{text}",
        "textfont": {"size": 10},
        "hovertemplate": "%{text}: %{z:,.4~g}<extra></extra>",
        "colorscale": [[0, "#f7fbff"], [1, "#6baed6"]],
        "xgap": 2,
        "ygap": 2,
        "colorbar": {"title": {"text": escape(picture.unit)}},
    }
    names = {"tickvals": list(range(len(rows))), "ticktext": [escape(name) for name in picture.rows]}
    layout = {
        "height": 160 + 46 * len(rows),
        "xaxis": {"visible": False},
        "yaxis": {**names, "showgrid": False, "zeroline": False, "automargin": True, "range": [len(rows) - 0.5, -0.5]},
    }
    return [heat], layout


_FIGURES: dict[type, Callable[[Any], tuple[list[Any], dict[str, Any]]]] = {
    Bars: _bars,
    Curves: _curves,
    Lanes: _lanes,
    Cells: _cells,
}


def _axis(name: str) -> dict[str, Any]:
    """A name, and complete numbers without powers of ten."""
    return {"title": {"text": escape(name)}, "tickformat": ",.6~r", "gridcolor": "#ddd", "zerolinecolor": "#999"}


def _lines(x: tuple[float, str] | None = None, y: tuple[float, str] | None = None) -> dict[str, Any]:
    """Dashed lines across a picture, each with its name at the end."""
    shapes, names = [], []
    for limit, across, along in ((x, "x", "y"), (y, "y", "x")):
        if limit is not None:
            ends = {f"{across}0": limit[0], f"{across}1": limit[0], f"{along}0": 0, f"{along}1": 1}
            shapes.append({"type": "line", f"{along}ref": "paper", **ends, "line": {"dash": "dash", "width": 1}})
            place = {across: limit[0], along: 1, f"{along}ref": "paper", "showarrow": False}
            names.append({"text": escape(limit[1]), **place, f"{along}anchor": "bottom" if along == "y" else "right"})
    return {"shapes": shapes, "annotations": names}


def _table(table: Table) -> str:
    header = "".join(f'<th><button type="button">{escape(name)}</button></th>' for name in table.header)
    rows = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in table.rows)
    return (
        f'<h2>{escape(table.title)}</h2>\n<div class="wide"><table>\n<thead><tr>{header}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n</table></div>"
    )


def _cell(cell: TableCell) -> str:
    number = "" if cell.key is None else f' class="number" data-key="{cell.key!r}"'
    return f"<td{number}>{escape(cell.text)}</td>"


def _words(words: Words) -> str:
    return f"<h2>{escape(words.title)}</h2>\n" + "\n".join(f"<p>{escape(line)}</p>" for line in words.lines)
