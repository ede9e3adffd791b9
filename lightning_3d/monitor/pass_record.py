"""The recorded timetable of a pipeline: a file in the run's folder, written by `Monitor3D(timetable_steps=...)`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from lightning_3d.errors import ConfigurationError
from lightning_3d.launch.hydra_job import write_side_file
from lightning_3d.layout import Schedule, stage_ranks
from lightning_3d.pipeline.pass_clock import Pass, PassClock, TimedStep
from lightning_3d.pipeline.pipeline import Pipeline
from lightning_3d.pipeline.schedule import stages_per_rank
from lightning_3d.ranks import talk

FILE = "lightning_3d_passes.json"
MOST_BYTES = 64 * 2**20
"""Size of a file that is read: a step of 64 ranks and 512 microbatches takes 3 MB."""
MOST_PASSES = 2**17
"""Of a step that is read."""
MOST_SECONDS, MOST_COUNT = 1e6, 10**6
ORDERS = (*get_args(Schedule), "fill_and_drain")
KINDS = ("F", "B", "I", "W", "H")


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """One batch."""

    number: int
    """Of the batch, from the start of training."""
    order: str
    """The schedule that ran: "fill_and_drain" where the loss is computed on the full batch."""
    microbatches: int
    passes: tuple[Pass, ...]
    """In seconds since the first of them began."""


@dataclass(frozen=True, kw_only=True)
class PassRecord:
    """Some steps of the pipeline that has rank 0."""

    schedule: Schedule
    ranks: int
    stages_per_rank: int
    steps: tuple[RecordedStep, ...]


def write_record(record: PassRecord, file: Path) -> None:
    rounded = lambda done: [round(done.start, 7), round(done.end, 7), *done[2:]]  # noqa: E731
    steps = [{**vars(step), "passes": [*map(rounded, step.passes)]} for step in record.steps]
    write_side_file(file, json.dumps({**vars(record), "steps": steps}))


def find_record(run: Path) -> Path:
    """The record in the folder `run` or below it, or `run` itself."""
    if run.is_file():
        return run
    found = sorted(run.rglob(FILE)) if run.is_dir() else []
    if not found:
        raise ConfigurationError(
            f"{run} has no {FILE}: a run in stages writes it to its folder with the callback"
            " Monitor3D(timetable_steps=3)."
        )
    if len(found) > 1:
        names = ", ".join(str(each) for each in found[:3])
        raise ConfigurationError(f"{run} has {len(found)} records: give one of {names}{', ...' if found[3:] else ''}.")
    return found[0]


def read_record(file: Path) -> PassRecord:
    """Read a record that others wrote: plain data, each value checked."""
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ConfigurationError(f"{file} cannot be read: it is larger than {MOST_BYTES:,} bytes.")
        return _record(json.loads(file.read_text()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(
            f"{file} is no record of Monitor3D(timetable_steps=...), or is damaged: {error!r:.200}. Run again to get"
            " a new one."
        ) from error


def _record(content: Any) -> PassRecord:
    ranks, chunks = _count(content, "ranks"), _count(content, "stages_per_rank")
    if content["schedule"] not in get_args(Schedule):
        raise ValueError("its schedule is unknown")
    placement = stage_ranks(content["schedule"], ranks, stages_per_rank(content["schedule"], chunks))
    steps = tuple(_step(each, placement) for each in content["steps"])
    if not steps:
        raise ValueError("it has no step")
    return PassRecord(schedule=content["schedule"], ranks=ranks, stages_per_rank=chunks, steps=steps)


def _step(content: Any, placement: tuple[int, ...]) -> RecordedStep:
    if content["order"] not in ORDERS:
        raise ValueError("the order of a step is unknown")
    microbatches, passes = _count(content, "microbatches"), content["passes"]
    if not 2 * len(placement) * microbatches <= len(passes) <= MOST_PASSES:
        raise ValueError("a step has too few passes or too many")
    own = tuple(_pass(each, placement) for each in passes)
    if not any(done.start < done.end for done in own):
        raise ValueError("no pass of a step takes any time")
    expected = [(stage, microbatch) for stage in range(len(placement)) for microbatch in range(microbatches)]
    for kinds in ("F", "BI"):
        if sorted((done.stage, done.microbatch) for done in own if done.kind in kinds) != expected:
            raise ValueError("a step does not have each pass once")
    return RecordedStep(
        number=_count(content, "number", least=0), order=content["order"], microbatches=microbatches, passes=own
    )


def _pass(content: Any, placement: tuple[int, ...]) -> Pass:
    start, end, rank, stage, microbatch, kind = content
    if not all(isinstance(each, int | float) for each in (start, end)) or not 0 <= start <= end <= MOST_SECONDS:
        raise ValueError(f"{content!r:.100} has no times")
    if not all(type(each) is int for each in (rank, stage, microbatch)) or kind not in KINDS:
        raise ValueError(f"{content!r:.100} is no pass")
    if not 0 <= stage < len(placement) or rank != placement[stage]:
        raise ValueError(f"{content!r:.100} is no pass of this pipeline")
    return Pass(float(start), float(end), rank, stage, microbatch, kind)


def _count(content: Any, name: str, least: int = 1) -> int:
    number = content[name]
    if type(number) is not int or not least <= number <= MOST_COUNT:
        raise ValueError(f"{name}={number!r:.40} is no number from {least} to {MOST_COUNT:,}")
    return number


class PassRecorder:
    """Times the passes of some batches on every rank and writes them on rank 0."""

    def __init__(self, pipeline: Pipeline, first: int, count: int, *, sends: bool) -> None:
        self._pipeline, self._first, self._count = pipeline, first, count
        self._sends = sends
        """True on the ranks of one pipeline: that of rank 0."""

    def begin_batch(self, number: int) -> None:
        """Begin to record with the first batch of the record."""
        if number == self._first:
            self._pipeline.clock = PassClock(self._pipeline.wire.device, self._pipeline.wire.rank)

    def ends_with(self, number: int) -> bool:
        return number == self._first + self._count - 1

    @property
    def under_way(self) -> bool:
        return self._pipeline.clock is not None

    def stop(self) -> None:
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
    every = (done for part in parts for done in part.passes)
    passes = tuple(done._replace(start=done.start - begin, end=done.end - begin) for done in every)
    return RecordedStep(number=number, order=parts[0].order, microbatches=parts[0].microbatches, passes=passes)
