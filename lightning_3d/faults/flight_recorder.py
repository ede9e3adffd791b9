"""The last actions of this process, kept in memory and written to a file when the job fails."""

import json
import os
import shutil
import sys
import sysconfig
import threading
import time
import traceback
import uuid
from collections import deque
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import lightning
import torch

from lightning_3d.module.torch_private import named_range
from lightning_3d.ranks.users_group_private import users_line

LENGTH = 100
"""Entries that are kept."""
DEPTH = 12
"""Innermost calls of each thread that are written down."""
_C10D = os.path.join("torch", "distributed", "distributed_c10d.py")
_STDLIB = {sysconfig.get_path("stdlib"), os.path.dirname(threading.__file__)}
_FOLDERS = [*_STDLIB, *map(os.path.realpath, _STDLIB), *(str(Path(str(m.__file__)).parent) for m in (torch, lightning))]
_LIBRARIES = (
    "<frozen ",  # parts of the standard library that are in the interpreter itself
    "<string>",  # what a library has made and compiled
    *(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages")),
    *(f"{folder}{os.sep}" for folder in (*_FOLDERS, Path(__file__).parents[1])),
)


@dataclass
class FlightEntry:
    """One operation in which this process waited for others."""

    at: float
    step: int
    phase: str
    operation: str
    thread: str
    seconds: float | None = None
    """None while it lasts."""
    error: str | None = None


class Flight:
    """The recorder. One per process, since others wait for the process; every thread writes to it."""

    def __init__(self) -> None:
        self.entries: deque[FlightEntry] = deque(maxlen=LENGTH)
        self.step, self.phase = 0, "starting"
        self.thread = threading.main_thread().ident
        """The thread that trains. Ray trains in another one than the main thread."""
        self.open: dict[int, list[FlightEntry]] = {}
        """The operations under way of each thread, the innermost last."""
        self.broken: FlightEntry | None = None
        """The first operation that failed."""

    def clear(self) -> None:
        """Forget what an earlier run in this process did. Called by the thread that trains."""
        self.entries.clear()
        self.thread = threading.get_ident()
        self.step, self.phase, self.broken = 0, "starting", None

    def at(self, phase: str, step: int | None = None) -> None:
        """Note that this process is now in `phase`, of optimizer step `step`."""
        self.phase = phase
        if step is not None:
            self.step = step

    def doing(self, operation: str) -> "Doing":
        """Return a context in which this process waits for other ranks in `operation`."""
        return Doing(self, operation)

    @property
    def waits(self) -> bool:
        """True while a thread of this process waits for other ranks. Any thread may ask."""
        return any(list(self.open.values()))

    def standing(self) -> str:
        """The current place of this process, in words. Any thread may ask."""
        waiting = {thread: entries[-1].operation for thread, entries in list(self.open.items()) if entries}
        place = waiting.pop(self.thread or 0, None) or _place(sys._current_frames().get(self.thread or 0))
        behind = f" (in the background: {', '.join(waiting.values())})" if waiting else ""
        return f"step {self.step}, {self.phase}, in {place}{behind}"

    def failing(self, error: BaseException) -> str:
        """The place of this process when it raised `error`, in words."""
        calls = list(traceback.walk_tb(error.__traceback__))[::-1]
        where = self.broken.operation if self.broken is not None else _collective(calls) or _line(_own(calls))
        return f"step {self.step}, {self.phase}" + (f", in {where}" if where else "")

    def write(self, path: Path, **rest: Any) -> None:
        """Write everything, and `rest`, to `path`: to another name, then renamed, so a reader never sees half of it."""
        entries = [asdict(entry) for entry in list(self.entries)]
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = {
            names.get(ident, str(ident)): [line.rstrip() for line in traceback.format_stack(frame)[-DEPTH:]]
            for ident, frame in sys._current_frames().items()
        }
        content = {**rest, "standing": self.standing(), "entries": entries, "stacks": stacks}
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
        with open(beside, "x") as file:  # the name cannot be guessed, and no existing link is followed
            file.write(json.dumps(content, indent=1, default=str))
        os.replace(beside, path)


class Doing:
    """The context of `Flight.doing`. It is a named range of a trace too."""

    def __init__(self, flight: Flight, operation: str) -> None:
        self.flight, self.operation = flight, operation

    def __enter__(self) -> None:
        flight, thread = self.flight, threading.current_thread()
        self.start = time.monotonic()
        self.entry = FlightEntry(time.time(), flight.step, flight.phase, self.operation, thread.name)
        flight.entries.append(self.entry)
        flight.open.setdefault(threading.get_ident(), []).append(self.entry)
        self.range = named_range(self.operation)
        self.range.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.range.__exit__(kind, error, trace)
        self.flight.open[threading.get_ident()].pop()
        self.entry.seconds = round(time.monotonic() - self.start, 6)
        if error is not None:
            self.entry.error = f"{type(error).__name__}: {error}"[:500]
            self.flight.broken = self.flight.broken or self.entry


def put_aside(folder: Path) -> None:
    """Begin with an empty `folder`: records of the run before move to `flight_before`, in the place of older ones.

    Only one of several processes that call it at once does so.
    """
    aside, before = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}"), folder.with_name(f"{folder.name}_before")
    try:
        folder.rename(aside)
    except FileNotFoundError:
        return
    shutil.rmtree(before, ignore_errors=True)
    aside.rename(before)


def _place(frame: FrameType | None) -> str:
    """The collective that `frame` waits in, else the innermost line of the user's own code."""
    calls = list(traceback.walk_stack(frame)) if frame is not None else []
    return _collective(calls) or _line([*_own(calls), *calls]) or "?"


Calls = list[tuple[FrameType, int]]
"""Frames, the innermost first, each with its line."""


def _own(calls: Calls) -> Calls:
    return [call for call in calls if not any(library in call[0].f_code.co_filename for library in _LIBRARIES)]


def _line(calls: Calls) -> str | None:
    return next((f"{frame.f_code.co_filename}:{line} ({frame.f_code.co_name})" for frame, line in calls), None)


def _collective(calls: Calls) -> str | None:
    """The outermost collective of `calls`, and the line of the user's code that called it."""
    codes = [frame.f_code for frame, _ in calls]
    public = [at for at, it in enumerate(codes) if it.co_filename.endswith(_C10D) and not it.co_name.startswith("_")]
    if not public:
        return None
    called = users_line(calls[public[-1] :])
    return _name(calls[public[-1]][0]) + (f", called at {called}" if called else "")


def _name(frame: FrameType) -> str:
    """The name of a collective and its axis: meshes name their groups after it."""
    axis = getattr(frame.f_locals.get("group"), "group_desc", None)
    return frame.f_code.co_name + (f" on {axis.removeprefix('mesh_')}" if axis else "")


flight = Flight()


EVENTS = 2000
"""Collectives of each rank that torch's own flight recorder remembers."""


def set_nccl_watchdog(backend: str, folder: Path) -> None:
    """Let torch write the last collectives of a rank to `folder` before NCCL aborts it. What the user set stays.

    The watchdog of this package writes to `folder` earlier than that, so the folder exists by then.
    """
    if "nccl" not in backend:
        return
    ours = {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_BUFFER_SIZE": str(EVENTS),
        "TORCH_FR_DUMP_TEMP_FILE": str(folder.absolute() / "nccl-rank-"),
    }
    for name, value in ours.items():
        os.environ.setdefault(name, value)
