"""Pictures and tables on one page of HTML that needs no other file and no network.

Names on a page come from modules, runs and files of others. They are escaped, and the page's policy runs its own script
alone: that with its checksum.
"""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import NamedTuple

from lightning_3d.tools.pictures.drawing import svg, written
from lightning_3d.tools.pictures.kinds import Picture


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
    exact: bool = False  # to copy, with their spaces


Part = Table | Words | Picture


def save_page(file: Path, title: str, parts: Sequence[Part]) -> Path:
    """Write `parts` below one another to `file`, and return it."""
    return written(file, page(title, parts).encode())


def page(title: str, parts: Sequence[Part]) -> str:
    script, style = _beside("page.js"), _beside("page.css")
    allowed = f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"
    policy = f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{escape(title)}</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(map(_part, parts))
        + f"\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _part(part: Part) -> str:
    if isinstance(part, Table | Words):
        return _table(part) if isinstance(part, Table) else _words(part)
    drawn = b64encode(svg(part)).decode()
    return f'<div class="wide"><img alt="{escape(part.title)}" src="data:image/svg+xml;base64,{drawn}"></div>'


def _beside(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


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
    lines = "\n".join(escape(line) if words.exact else f"<p>{escape(line)}</p>" for line in words.lines)
    return f"<h2>{escape(words.title)}</h2>\n" + (f"<pre>{lines}</pre>" if words.exact else lines)
