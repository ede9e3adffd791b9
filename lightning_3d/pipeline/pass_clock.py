"""Times of the passes of a step, where somebody asks for them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

Mark = float | torch.cuda.Event
"""A moment: of the host's clock, or on a GPU an event of its stream, whose time is known later."""


class Pass(NamedTuple):
    """One pass of one microbatch through one virtual stage: `F`, `B` (a complete backward), or its halves `I`, `W`.

    `H` is the head on the full batch.
    """

    start: float
    end: float
    rank: int
    stage: int
    microbatch: int
    kind: str


@dataclass(frozen=True)
class TimedStep:
    order: str
    """Name of the schedule that ran: "fill_and_drain" where the loss is computed on the full batch."""
    microbatches: int
    passes: list[Pass] = field(default_factory=list)


class PassClock:
    """Notes when passes begin and end. Begin is after the wait for their inputs.

    On a GPU it records events in the stream and reads no value from the device: `take` waits once, for the last event.
    """

    def __init__(self, device: torch.device, rank: int) -> None:
        self._device, self._rank = device, rank
        self._steps: list[tuple[TimedStep, list[tuple[Mark, Mark, int, int, str]]]] = []

    def begin_step(self, order: str, microbatches: int) -> None:
        self._steps.append((TimedStep(order, microbatches), []))

    @contextmanager
    def timing(self, kind: str, stage: int, microbatch: int) -> Iterator[None]:
        begin = self._mark()
        yield
        self._steps[-1][1].append((begin, self._mark(), stage, microbatch, kind))

    def take(self) -> list[TimedStep]:
        """The steps so far, in seconds of the host's clock."""
        last, now = self._mark(), time.time()
        if isinstance(last, torch.cuda.Event):
            last.synchronize()
            now = time.time()

        def seconds(mark: Mark) -> float:
            if isinstance(mark, float):
                return mark
            assert isinstance(last, torch.cuda.Event)
            return now - mark.elapsed_time(last) / 1e3

        for step, marks in self._steps:
            for begin, end, stage, microbatch, kind in marks:
                step.passes.append(Pass(seconds(begin), seconds(end), self._rank, stage, microbatch, kind))
        taken, self._steps = [step for step, _ in self._steps], []
        return taken

    def _mark(self) -> Mark:
        if self._device.type != "cuda":
            return time.time()  # the processes of a host share it; those of several hosts have clocks as near as NTP
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
