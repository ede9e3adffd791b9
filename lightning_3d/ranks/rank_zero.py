"""Rank zero where not every rank runs the code: the acting rank zero, and answers that other ranks cannot give now.

A pipelined `training_step` runs to its end on the last stage only. Its code for rank 0 (`trainer.is_global_zero`,
`rank_zero_info`) runs there; in a trial run of the step, on no rank.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_3d.errors import UnsupportedError


class _Now:
    acts: bool | None = None
    """True where this rank acts as rank 0, False where it must not. None: rank 0 does."""
    rank_local = False
    answers: dict[str, str] = {}  # noqa: RUF012 (one for the process)
    """Rank 0's text for each text of this rank (`trainer.log_dir`, say) that all ranks have broadcast."""


@contextmanager
def acting_as_rank_zero(acts: bool) -> Iterator[None]:
    """Let this rank act as rank 0 inside, or with False forbid it."""
    with patch.object(_Now, "acts", acts), patch.object(rank_zero_only, "rank", 0 if acts else 1):
        yield


def rank_local() -> AbstractContextManager[Any]:
    """Mark code that other ranks do not run: they would not answer."""
    return patch.object(_Now, "rank_local", True)


def is_zero(rank: int) -> bool:
    """True where `rank`, this one, acts as rank 0 now."""
    return rank == 0 if _Now.acts is None else _Now.acts


def is_rank_local() -> bool:
    return _Now.rank_local


def remember(text: object, answer: object) -> None:
    """Keep rank 0's answer to `text`, for rank-local code that asks again."""
    if isinstance(text, str) and isinstance(answer, str):
        _Now.answers[text] = answer


def answer_to(text: object) -> str:
    """Rank 0's answer to `text`, if all ranks asked before."""
    if isinstance(text, str) and text in _Now.answers:
        return _Now.answers[text]
    refuse(f"a broadcast of {type(text).__name__!r}")


def refuse_where_local(what: str) -> None:
    """Raise in code that other ranks do not run: `what` needs them."""
    if _Now.rank_local:
        refuse(what)


def refuse(what: str) -> NoReturn:
    """Raise: `what` needs ranks that do not run this code."""
    raise UnsupportedError(
        f"training_step asks for {what}. Under a pipeline only the last stage runs it to its end, once per microbatch,"
        " and the other ranks would not answer. Ask in on_train_batch_start, and keep the answer."
    )
