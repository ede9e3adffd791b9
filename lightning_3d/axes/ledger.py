"""Calls and bytes of communication, counted where they are sent, and the seconds that a step waits for them."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from lightning_3d.module.torch_private import named_range

IDLE = "pipeline_idle"
"""The reason of waits for a tensor of another stage. The others are named by their axis."""


class Row(NamedTuple):
    """The bytes that one rank sent along one axis with one collective since the last reset."""

    axis: str
    collective: str
    calls: int
    bytes: int


class Waiting:
    """A context that adds its seconds to those of its reason, and has a name in a trace."""

    def __init__(self, waited: dict[str, float], reason: str, name: str) -> None:
        self._waited, self._reason, self._range = waited, reason, named_range(name)

    def __enter__(self) -> None:
        self._range.__enter__()
        self._began = time.perf_counter()

    def __exit__(self, *error: Any) -> None:
        self._waited[self._reason] = self._waited.get(self._reason, 0.0) + time.perf_counter() - self._began
        self._range.__exit__(*error)


class Ledger:
    """Counts calls and bytes sent by this rank, per axis and collective.

    Always on: one locked addition per collective, not per message. The background thread writes to it while the
    main thread reads. Native collectives count the bytes that a ring would send.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], tuple[int, int]] = {}
        self._waited: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, axis: str, collective: str, sent: int) -> None:
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
    def aside(self, axis: str | None = None) -> Iterator[None]:
        """Do not count messages that are sent inside: those along `axis`, where other threads may send others."""
        with self._lock:
            before = dict(self._counts)
        try:
            yield
        finally:
            with self._lock:
                others = {key: count for key, count in self._counts.items() if axis not in (None, key[0])}
                self._counts = {key: count for key, count in before.items() if key not in others} | others

    def waiting(self, reason: str, name: str = "waiting") -> "Waiting":
        """Count the seconds inside as waits of the step for `reason`, an axis or `IDLE`. Contexts must not nest.

        Only for hosts that wait themselves, as with gloo. With NCCL the host goes on, and its device waits.
        """
        return Waiting(self._waited, reason, name)

    @property
    def waited(self) -> dict[str, float]:
        """Seconds of all waits so far, by reason."""
        return dict(self._waited)

    def reset(self) -> None:
        with self._lock:
            self._counts.clear()
