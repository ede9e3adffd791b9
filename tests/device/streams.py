"""Streams and events of the card.

Work on the first stream is done where it is asked for: it is the host's. Another stream has a thread where `DELAYS` is
set, and what is asked for on it is done later. A read before its event then reads old data. `order` finds it too.
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
from weakref import WeakSet

from tests.device import order, waits

NAME = "card"
"""Of the device."""
DELAYS = 0.0
"""The longest random time by which work is late, in seconds."""
_of_thread = threading.local()
_lanes = count()
_streams: "WeakSet[Stream]" = WeakSet()


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.done: Future[Any] | None = None
        self.moment: order.Moment = {}

    def record(self, stream: "Stream | None" = None) -> "Event":
        stream = stream or current()
        self.done, self.moment = stream.end(), stream.clock.now()
        return self

    def wait(self, stream: "Stream | None" = None) -> None:
        (stream or current()).wait_for(self.done, self.moment)

    def query(self) -> bool:
        done = self.done is None or self.done.done()
        if done:
            order.host_waits(self.moment)
        return done

    def synchronize(self) -> None:
        waits.note("Event.synchronize")
        if self.done is not None:
            self.done.result()
        order.host_waits(self.moment)


class Stream:
    """Work in the order in which it was asked for."""

    stream_id = device_index = device_type = 0
    """What FSDP hands to an operation from torch 2.15 on, which does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.lane: Lane | None = None
        self.clock = order.Clock()
        _streams.add(self)

    def is_capturing(self) -> bool:
        """Asked by optimizers from torch 2.15 on."""
        return False

    @property
    def is_late(self) -> bool:
        return DELAYS > 0 and self is not FIRST

    def put(self, task: Callable[[], Any]) -> Future[Any]:
        self.lane = self.lane or Lane()
        return self.lane.put(task)

    def end(self) -> Future[Any] | None:
        """Of what was asked for so far. None: that is done."""
        return None if self.lane is None else self.lane.put(None)

    def wait_for(self, done: Future[Any] | None, moment: order.Moment) -> None:
        """Do nothing more before `done`. On the first stream that is the host, and nothing else waits there."""
        self.clock.follow(moment)
        if done is not None:
            if self.is_late:
                self.put(done.result)
            else:
                done.result()

    def catch_up(self) -> None:
        if (end := self.end()) is not None:
            end.result()

    def wait_event(self, event: Event) -> None:
        self.wait_for(event.done, event.moment)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        return (event or Event()).record(self)

    def finish(self) -> None:
        """Let the host wait for all of it."""
        self.catch_up()
        order.host_waits(self.clock.now())

    def synchronize(self) -> None:
        waits.note("Stream.synchronize")
        self.finish()

    def query(self) -> bool:
        return self.record_event().query()

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
    waits.note("synchronize")
    for stream in list(_streams):
        stream.finish()
