"""Calls and bytes of communication, counted where they are sent."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Row(NamedTuple):
    """The bytes that one rank sent along one axis with one collective since the last reset."""

    axis: str
    collective: str
    calls: int
    bytes: int


class Ledger:
    """Counts calls and bytes sent by this rank, per axis and collective.

    Always on: one locked addition per collective, not per message. The background thread writes to it while the
    main thread reads. For collectives of a library (native ones) the bytes are those a ring would send, since the
    library does not tell.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], tuple[int, int]] = {}
        self._lock = threading.Lock()

    def add(self, axis: str, collective: str, sent: int) -> None:
        """Count one call of `collective` that sent `sent` bytes."""
        with self._lock:
            calls, total = self._counts.get((axis, collective), (0, 0))
            self._counts[axis, collective] = (calls + 1, total + sent)

    def rows(self) -> list[Row]:
        """Return all counts, sorted by axis and collective."""
        with self._lock:
            return [Row(axis, collective, *count) for (axis, collective), count in sorted(self._counts.items())]

    def bytes(self, axis: str | None = None, collective: str | None = None) -> int:
        """Return the bytes sent, over all axes or collectives where not named."""
        return sum(
            row.bytes for row in self.rows() if axis in (None, row.axis) and collective in (None, row.collective)
        )

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Do not count messages that are sent inside."""
        with self._lock:
            before = dict(self._counts)
        try:
            yield
        finally:
            with self._lock:
                self._counts = before

    def reset(self) -> None:
        """Start again from nothing."""
        with self._lock:
            self._counts.clear()
