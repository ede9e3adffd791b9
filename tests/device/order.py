"""The order of the card's work: memory that two streams use without an event between them is an error.

Each stream and each communicator has a clock, and so has the host. A clock knows how far the others were at the last
event that it waited for. CUDA runs work that a clock does not know before, after, or at the same time.
"""

import torch
from torch import Tensor


class RaceError(RuntimeError):
    """Work uses memory that other work may be writing, or the host writes what a copy may be reading."""


class Clock:
    """What was asked of a stream so far, and what of others it follows."""

    def __init__(self) -> None:
        self.seen: dict[Clock, int] = {self: 0}

    def follow(self, moment: "Moment") -> None:
        for clock, time in tuple(moment.items()):
            self.seen[clock] = max(self.seen.get(clock, 0), time)

    def begin(self) -> "Clock":
        """Ask for something more: it follows all that the host has waited for."""
        self.follow(HOST.seen)
        self.seen[self] += 1
        return self

    def now(self) -> "Moment":
        return dict(self.seen)


Moment = dict[Clock, int]
HOST = Clock()
_sent: list[tuple[Moment, Tensor, Tensor]] = []
"""Copies from pinned memory that the host has not waited for: when, the memory, and what it had."""


class Uses:
    def __init__(self, clock: Clock) -> None:
        self.written: Moment = {clock: clock.seen[clock]}
        self.read: Moment = {}

    def add(self, clock: Clock, writes: bool, what: str) -> None:
        for other, time in [*self.written.items(), *(self.read.items() if writes else ())]:
            if clock.seen.get(other, 0) < time:
                raise RaceError(f"{what} uses memory that another stream uses: it waited for no event behind that")
        mine = {clock: clock.seen[clock]}
        if writes:
            self.written, self.read = mine, {}
        else:
            self.read |= mine


def send(source: Tensor, clock: Clock) -> None:
    """Remember that the card reads `source` until the host has waited for it."""
    _sent.append(({clock: clock.seen[clock]}, source, source.clone()))


def host_waits(moment: Moment) -> None:
    """Let the host know all before `moment`, and refuse what it wrote meanwhile to memory that was under way."""
    HOST.follow(moment)
    for sent in [each for each in _sent if all(HOST.seen.get(clock, 0) >= time for clock, time in each[0].items())]:
        _sent.remove(sent)
        _, source, had = sent
        if not torch.equal(_bytes(source), _bytes(had)):
            raise RaceError(f"memory of shape {tuple(had.shape)} was written while a copy to the card could read it")


def _bytes(host: Tensor) -> Tensor:
    return host.reshape(-1).view(torch.uint8)
