"""One background thread that runs collectives in the order they were submitted."""

import queue
import threading
from collections.abc import Callable

from lightning_3d.axes.group import Group
from lightning_3d.axes.ledger import Ledger
from lightning_3d.errors import DivergenceError, PeerError
from lightning_3d.layout import DATA_AXIS
from lightning_3d.module.torch_private import named_range

Ending = Callable[[], None]
Job = Callable[[], Ending | object]
"""Runs a collective, or begins one and returns what ends it."""


class Handle:
    """A submitted job: wait for it before reading what it writes."""

    def __init__(self, job: Job, ledger: Ledger | None = None, name: str = "") -> None:
        self._job: Job | None = job
        self._name = name
        self._ending: Ending | None = None
        self._ledger = ledger
        self._done = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        """Return once the job has run and what it began has ended; raise what it raised."""
        with named_range(f"waiting for {self._name}"):  # a trace does not see the thread that runs the job
            if self._ledger is not None and not self._done.is_set():
                with self._ledger.waiting(DATA_AXIS):
                    self._done.wait()
            self._done.wait()
            if self.error is not None:
                raise self.error
            ending, self._ending = self._ending, None
            if ending is not None:
                ending()

    def done(self) -> bool:
        return self._done.is_set()

    def run(self, *, finish: bool) -> None:
        """Run the job here (the engine calls this). `finish`: also end what it begins, else `wait` does."""
        job, self._job = self._job, None  # dropped once run: it holds the buffers
        assert job is not None
        try:
            ending = job()
            if finish and callable(ending):
                ending()
        except BaseException as error:  # surfaces at wait()
            self.fail(error)
        else:
            self._ending = ending if callable(ending) and not finish else None
            self._done.set()

    def fail(self, error: BaseException) -> None:
        self._job, self.error = None, error
        self._done.set()


class BackgroundQueue:
    """Runs jobs one after the other in a background thread, or each at once where the backend is asynchronous (NCCL).

    Every rank must submit the same collectives in the same order, on process groups that nothing else uses meanwhile. A
    job that fails fails every later one: after a broken collective the ranks no longer agree on what comes next. A job
    cannot wait longer than its process group's timeout, so neither can `Handle.wait`.
    """

    def __init__(self, *, threaded: bool = True, ledger: Ledger | None = None) -> None:
        self._ledger = ledger
        self._queue: queue.SimpleQueue[Handle | None] = queue.SimpleQueue()
        self._broken: BaseException | None = None
        self._closed = False
        self._at_once = Group().simulated  # fake tensors know one thread
        self._thread: threading.Thread | None = None
        if threaded:
            self._thread = threading.Thread(target=self._loop, name="lightning_3d.comm", daemon=True)
            self._thread.start()

    @property
    def threaded(self) -> bool:
        return self._thread is not None

    @property
    def idle(self) -> bool:
        """Return True if all submitted jobs have run without an error."""
        return self._broken is None and self._queue.empty() and (self._thread is None or not self._thread.is_alive())

    def submit(self, job: Job, name: str = "a collective") -> Handle:
        """Queue `job`; it runs after all that were submitted before it. A trace shows waits for it by its name."""
        if self._closed:
            raise PeerError("a collective was submitted after the communication engine was closed (teardown).")
        handle = Handle(job, self._ledger, name)
        if self.threaded and not self._at_once:
            self._queue.put(handle)
        else:
            self._run(handle, finish=False)
        return handle

    def close(self, timeout: float = 5.0) -> None:
        """Finish what is queued and stop. After an error the queue is dropped. Waits `timeout` seconds at most."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(timeout)

    def _loop(self) -> None:
        while (handle := self._queue.get()) is not None:
            self._run(handle, finish=True)
            del handle  # or the last job's buffers live until the next one comes

    def _run(self, handle: Handle, *, finish: bool) -> None:
        if self._broken is not None:
            handle.fail(_after(self._broken))
            return
        handle.run(finish=finish)
        self._broken = handle.error


def _after(error: BaseException) -> BaseException:
    if isinstance(error, DivergenceError):
        return error
    failure = PeerError(f"an earlier collective failed, so this one was not run: {error}")
    failure.__cause__ = error
    return failure
