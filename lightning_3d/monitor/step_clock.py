"""The time of training, divided: computing, waits for each axis, idle in the pipeline, data, optimizer, the rest."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from lightning_3d.axes.ledger import IDLE, Ledger
from lightning_3d.layout import AXES, EXPERT_AXIS, short_name

PARTS = ("step", "data", "optimizer", "pause")
"""A pause is a validation, which does not count."""
AXIS_NAMES = {axis: f"{short_name(axis)}_axis" for axis in (*AXES, EXPERT_AXIS)} | {IDLE: IDLE}
"""Reason of a wait in the ledger -> name of its share."""


@dataclass(frozen=True)
class Spent:
    """The time of some batches on this rank."""

    batches: int = 0
    seconds: float = 0.0
    """Of all, without validation."""
    step: float = 0.0
    """Inside batches: from their start to their end."""
    data: float = 0.0
    """Waiting for the loader."""
    optimizer: float = 0.0
    """Clipping and stepping, without waits for other ranks."""
    waited: Mapping[str, float] = field(default_factory=dict)
    """Inside batches, by reason."""
    sent: int = 0
    """Bytes."""

    @property
    def compute(self) -> float:
        return max(0.0, self.step - self.optimizer - sum(self.waited.values()))

    @property
    def busy(self) -> float:
        """The time in which this rank waited for no other rank."""
        return max(0.0, self.seconds - sum(self.waited.values()))

    def shares(self) -> dict[str, float]:
        """Name -> share of the time. They add up to 1."""
        parts = {"compute": self.compute}
        parts |= {AXIS_NAMES[reason]: seconds for reason, seconds in self.waited.items() if reason in AXIS_NAMES}
        parts |= {"data_waiting": self.data, "optimizer": self.optimizer}
        parts["other"] = max(0.0, self.seconds - sum(parts.values()))
        return {name: seconds / self.seconds if self.seconds else 0.0 for name, seconds in parts.items()}

    def __add__(self, other: "Spent") -> "Spent":
        reasons = {**self.waited, **other.waited}
        return Spent(
            self.batches + other.batches,
            self.seconds + other.seconds,
            self.step + other.step,
            self.data + other.data,
            self.optimizer + other.optimizer,
            {reason: self.waited.get(reason, 0.0) + other.waited.get(reason, 0.0) for reason in reasons},
            self.sent + other.sent,
        )


class StepClock:
    """Reads the host's clock where Lightning's loop passes from one thing to the next."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._began: dict[str, float] = {}
        self._waited: dict[str, float] = {}
        self._stepping: tuple[float, float] | None = None
        """Time and waits so far where an optimizer began to step."""
        self._stepped: tuple[float, float] | None = None
        self.restart()

    def restart(self) -> None:
        """Begin to count from nothing, between two batches."""
        self._last = time.perf_counter()
        self._batches, self._sums = 0, dict.fromkeys(PARTS, 0.0)
        self._inside: dict[str, float] = {}
        self._sent = self._ledger.bytes()

    def begin(self, part: str) -> None:
        self._began[part] = time.perf_counter()
        if part == "step":
            self._waited = self._ledger.waited

    def begin_optimizer(self) -> None:
        """An optimizer is about to step. It ends with the last `optimizer_stepped`."""
        self.end_optimizer()
        self._stepping = (time.perf_counter(), self._waits())

    def optimizer_stepped(self) -> None:
        """Its `step` has ended. One that calls the `step` of its base class says so twice."""
        self._stepped = (time.perf_counter(), self._waits())

    def end_optimizer(self) -> None:
        """Add the time of an optimizer that has begun to step, without its waits for other ranks."""
        if self._stepping is not None:
            began, waited = self._stepping
            ended, waits = self._stepped if self._stepped is not None else (time.perf_counter(), self._waits())
            self._sums["optimizer"] += max(0.0, ended - began - (waits - waited))
        self._stepping = self._stepped = None

    def end(self, part: str) -> None:
        if part not in self._began:
            return
        self._sums[part] += time.perf_counter() - self._began.pop(part)
        if part == "step":
            self.end_optimizer()
            self._batches += 1
            for reason, total in self._ledger.waited.items():
                added = total - self._waited.get(reason, 0.0)
                self._inside[reason] = self._inside.get(reason, 0.0) + added

    def take(self) -> Spent:
        """The time since the last `take` or `restart`, between two batches."""
        now = time.perf_counter()
        sums = self._sums
        seconds = max(0.0, now - self._last - sums["pause"])
        sent = self._ledger.bytes() - self._sent
        spent = Spent(self._batches, seconds, sums["step"], sums["data"], sums["optimizer"], self._inside, sent)
        self.restart()
        return spent

    def _waits(self) -> float:
        return sum(self._ledger.waited.values())
