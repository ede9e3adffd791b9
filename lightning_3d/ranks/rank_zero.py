"""Code that not every rank runs now: who does there what only rank 0 does, and what other ranks cannot be asked.

A pipelined `training_step` runs to its end on the last stage only. What it does "on rank 0" (`trainer.is_global_zero`,
`rank_zero_info`) is done there; where a step is run on trial, nowhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_3d.errors import UnsupportedError


class _Now:
    speaks: bool | None = None
    """Whether this rank takes the part of rank 0; None where each plays itself."""
    alone = False
    heard: dict[str, str] = {}  # noqa: RUF012 (one for the process)
    """What rank 0 had in place of a text (`trainer.log_dir`, say) when all ranks asked."""


@contextmanager
def speaking(speaks: bool) -> Iterator[None]:
    """This rank, or else another or none, is rank 0 to the code inside."""
    before, rank = _Now.speaks, rank_zero_only.rank  # type: ignore[attr-defined]
    _Now.speaks, rank_zero_only.rank = speaks, 0 if speaks else 1  # type: ignore[attr-defined]
    try:
        yield
    finally:
        _Now.speaks, rank_zero_only.rank = before, rank  # type: ignore[attr-defined]


@contextmanager
def alone() -> Iterator[None]:
    """Other ranks do not run what is inside, and would not answer."""
    before, _Now.alone = _Now.alone, True
    try:
        yield
    finally:
        _Now.alone = before


def is_zero(rank: int) -> bool:
    """Whether `rank`, this one, does now what only rank 0 does."""
    return rank == 0 if _Now.speaks is None else _Now.speaks


def is_alone() -> bool:
    return _Now.alone


def hear(text: object, answer: object) -> None:
    """Keep what rank 0 had in place of `text`, for code that asks again where it is alone."""
    if isinstance(text, str) and isinstance(answer, str):
        _Now.heard[text] = answer


def heard(text: object) -> str:
    """What rank 0 has in place of `text`."""
    if isinstance(text, str) and text in _Now.heard:
        return _Now.heard[text]
    refuse(f"a broadcast of {type(text).__name__!r}")


def refuse(what: str) -> NoReturn:
    """Say that `what` needs ranks that are elsewhere."""
    raise UnsupportedError(
        f"training_step asks for {what}. Under a pipeline only the last stage runs it to its end, once per microbatch,"
        " and the other ranks would not answer. Ask in on_train_batch_start, and keep the answer."
    )
