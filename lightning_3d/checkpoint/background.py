"""A save in the background: one at a time, awaited before the next."""

from collections.abc import Callable
from datetime import timedelta
from threading import Lock, Thread
from typing import Any

from torch import distributed as dist


class Background:
    """Runs a save in a thread, over a process group of its own: the main thread uses the others."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._after: list[Callable[[], None]] = []
        self._over = True
        self._lock = Lock()

    def __reduce__(self) -> Any:
        return Background, ()  # a strategy that is copied or sent to another process saves nothing yet

    def start(self, work: Callable[[dist.ProcessGroup | None], None], timeout: timedelta) -> None:
        """Run `work` with a group of all ranks, of which each message ends within `timeout`. Collective."""
        assert self._thread is None, "await the save before"
        if dist.is_initialized() and self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._over = False
        self._thread = Thread(target=self._run, args=(work,), name="lightning_3d save", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[dist.ProcessGroup | None], None]) -> None:
        try:
            work(self._group)
        except Exception as error:  # raised by `wait`, in the thread that trains
            self._error = error
        with self._lock:
            self._over = True
            if self._error is None:
                self._error = _first_error(self._after)
            self._after = []

    def afterwards(self, do: Callable[[], None]) -> None:
        """Call `do` once nothing is under way, unless what was has failed."""
        with self._lock:
            if not self._over:
                self._after.append(do)
                return
            failed = self._error is not None
        if not failed:
            do()

    def wait(self, patience: float | None = None) -> None:
        """Return once nothing is under way; raise what went wrong since the last time.

        Args:
            patience: seconds after which to raise.
        """
        if self._thread is None:
            return
        self._thread.join(patience)
        if self._thread.is_alive():
            return
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Give the group back, whose threads and sockets would add up over the runs of a process."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def _first_error(calls: list[Callable[[], None]]) -> Exception | None:
    for call in calls:
        try:
            call()
        except Exception as error:
            return error
    return None
