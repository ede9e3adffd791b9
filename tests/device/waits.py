"""Places where the host waits for the card."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_HERE = Path(__file__).parent


class _Noted:
    places: list[str] | None = None
    """None: they are not looked for."""
    refused = False


def note(what: str) -> None:
    if _Noted.places is None:
        return
    if _Noted.refused:
        raise RuntimeError(f"called a synchronizing operation: {what}")
    outside = [frame for frame in traceback.extract_stack() if not _is_of_the_card(Path(frame.filename))]
    _Noted.places.append(f"{what}: " + " < ".join(f"{frame.filename}:{frame.lineno}" for frame in outside[-1:-9:-1]))


def _is_of_the_card(file: Path) -> bool:
    return file.parent == _HERE and not file.name.startswith("test_")


@contextmanager
def noted(refused: bool = False) -> Iterator[list[str]]:
    """Note the places where the host waits for the card, or refuse them."""
    before = _Noted.places, _Noted.refused
    _Noted.places, _Noted.refused = [], refused
    try:
        yield _Noted.places
    finally:
        _Noted.places, _Noted.refused = before
