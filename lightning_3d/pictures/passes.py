"""Timetables of a pipeline as spans of a picture."""

from collections.abc import Sequence

from lightning_3d.pictures.kinds import SPANS, Span
from lightning_3d.pictures.timetable import Pass


def pass_spans(passes: Sequence[Pass], ranks: int, factor: float = 1.0) -> tuple[Span, ...]:
    """A span for each pass, its seconds times `factor`. Later virtual stages of a rank are lighter."""
    chunks = max(done.stage for done in passes) // ranks
    return tuple(
        Span(
            done.start * factor,
            done.end * factor,
            done.rank,
            done.kind,
            done.stage // ranks / max(1, chunks),
            f"{SPANS[done.kind][0]}, stage {done.stage}, microbatch {done.microbatch}",
        )
        for done in passes
    )


def most_seconds(passes: Sequence[Pass]) -> float:
    return max(done.end for done in passes)


def scale(seconds: float) -> tuple[float, str]:
    """Factor and name of the unit in which `seconds` is a number of few digits."""
    return (1.0, "seconds") if seconds >= 1 else (1e3, "milliseconds")
