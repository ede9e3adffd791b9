"""Streams and events of the card.

Work on the first stream is done where it is asked for: it is the host's. Another stream has a thread where `DELAYS` is
set, and what is asked for on it is done later. A read before its event then reads old data.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import count
from queue import SimpleQueue
from typing import Any

NAME = "card"
"""Of the device."""
DELAYS = 0.0
"""The longest random time by which work is late, in seconds."""
_of_thread = threading.local()
_lanes = count()


class Event:
    """A moment of a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.done: Future[Any] | None = None

    def record(self, stream: "Stream | None" = None) -> "Event":
        self.done = (stream or current()).moment()
        return self

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or current()).wait_for(self.done)

    def query(self) -> bool:
        return self.done is None or self.done.done()

    def synchronize(self) -> None:
        FIRST.wait_for(self.done)


class Stream:
    """Work in the order in which it was asked for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.lane: Lane | None = None

    @property
    def is_late(self) -> bool:
        return DELAYS > 0 and self is not FIRST

    def put(self, task: Callable[[], Any]) -> Future[Any]:
        self.lane = self.lane or Lane()
        return self.lane.put(task)

    def moment(self) -> Future[Any] | None:
        """The end of what was asked for so far. None: that is done."""
        return None if self.lane is None else self.lane.put(None)

    def wait_for(self, done: Future[Any] | None) -> None:
        """Do nothing more before `done`. On the first stream that is the host, and nothing else waits there."""
        if done is not None:
            if self.is_late:
                self.put(done.result)
            else:
                done.result()

    def wait_event(self, event: Event) -> None:
        self.wait_for(event.done)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_for(other.moment())

    def record_event(self, event: Event | None = None) -> Event:
        return (event or Event()).record(self)

    def synchronize(self) -> None:
        FIRST.wait_for(self.moment())

    def query(self) -> bool:
        return (done := self.moment()) is None or done.done()

    def __enter__(self) -> "Stream":
        self._before = current()
        _of_thread.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        _of_thread.stream = self._before


class Lane:
    """A thread that does what it is given in order, each thing late, until one of them fails: then the others do too."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Callable[[], Any] | None, Future[Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, task: Callable[[], Any] | None) -> Future[Any]:
        done: Future[Any] = Future()
        self._tasks.put((task, done))
        return done

    def end(self) -> None:
        self._tasks.put(None)

    def _run(self) -> None:
        failed: BaseException | None = None
        draw = random.Random(next(_lanes))
        while (given := self._tasks.get()) is not None:
            task, done = given
            if failed is None and task is not None:
                time.sleep(draw.uniform(0, DELAYS))
                try:
                    task()
                except BaseException as error:
                    failed = error
            done.set_result(None) if failed is None else done.set_exception(failed)
            del given, task, done  # the memory that they had


FIRST = Stream()


def current(device: Any = None) -> Stream:
    return getattr(_of_thread, "stream", FIRST)


@contextmanager
def using(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    with stream:
        yield


def synchronize(device: Any = None) -> None:
    """Nothing of the first stream is ever under way."""
    current().synchronize()
