"""Records the timetable of a pipeline in some batches of a training."""

from collections.abc import Sequence
from pathlib import Path

from lightning_3d.monitor.pass_record import FILE, PassRecord, RecordedStep, write_record
from lightning_3d.monitor.timetable import Pass
from lightning_3d.pipeline.pass_clock import PassClock, TimedStep
from lightning_3d.pipeline.pipeline import Pipeline
from lightning_3d.ranks import talk


class PassRecorder:
    """Times the passes of some batches on every rank and writes them on rank 0."""

    def __init__(self, pipeline: Pipeline, first: int, count: int, *, sends: bool) -> None:
        self._pipeline, self._first, self._count = pipeline, first, count
        self._sends = sends
        """True on the ranks of one pipeline: that of rank 0."""

    def begin_batch(self, number: int) -> None:
        """Begin to record with the first batch of the record."""
        if number == self._first:
            self._pipeline.clock = PassClock(self._pipeline.wire.device)

    def ends_with(self, number: int) -> bool:
        """Return True if batch `number` is the last of the record."""
        return number == self._first + self._count - 1

    @property
    def under_way(self) -> bool:
        return self._pipeline.clock is not None

    def stop(self) -> None:
        """Record no more."""
        self._pipeline.clock = None

    def write(self, folder: Path | None) -> None:
        """Write what is recorded to `folder`, on the rank that has one. Collective."""
        clock, self._pipeline.clock = self._pipeline.clock, None
        assert clock is not None, "a record is written once"
        ranks = [steps for steps in talk.gather(clock.take() if self._sends else None) if steps is not None]
        if folder is not None:
            steps = [_joined(self._first + at, parts) for at, parts in enumerate(zip(*ranks, strict=True))]
            record = PassRecord(
                schedule=self._pipeline.schedule,  # type: ignore[arg-type]
                ranks=self._pipeline.wire.size,
                stages_per_rank=self._pipeline.per_rank,
                steps=tuple(steps),
            )
            write_record(record, folder / FILE)


def _joined(number: int, parts: Sequence[TimedStep]) -> RecordedStep:
    """One batch from the parts of all pipeline ranks."""
    begin = min(done.start for part in parts for done in part.passes)
    passes = [
        Pass(done.start - begin, done.end - begin, rank, done.stage, done.microbatch, done.kind)
        for rank, part in enumerate(parts)
        for done in part.passes
    ]
    first = parts[0]
    return RecordedStep(number=number, order=first.order, microbatches=first.microbatches, passes=tuple(passes))
