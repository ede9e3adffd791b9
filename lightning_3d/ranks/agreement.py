"""`together` and `agree`: the one protocol for an error of one rank in code that all ranks run.

Ranks that run the same code meet at its end, each with an error or with none. If one has an error, all raise it.
"""

import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed as dist

from lightning_3d.errors import DivergenceError, PeerError
from lightning_3d.ranks import talk

T = TypeVar("T")
PATIENCE = 5.0
"""Seconds that a failing rank waits for the others. Then they wait elsewhere, for a message of this rank."""


def together(
    make: Callable[[], T],
    errors: type[Exception] = Exception,
    group: dist.ProcessGroup | None = None,
    *,
    local: bool = False,
) -> T:
    """The result of this rank's `make()`. If it raises one of `errors` on some ranks, every rank raises the first.

    Collective. Any other error is raised at once and on this rank alone.
    """
    made: list[T] = []
    agree(error_of(lambda: made.append(make()), errors), group=group, local=local)
    return made[0]


def error_of(run: Callable[[], object], errors: type[Exception] = Exception) -> Exception | None:
    """The error, one of `errors`, that `run()` raises. One that this rank raises alone is not caught."""
    try:
        run()
    except errors as error:
        raise_if_alone(error)
        return error
    return None


def agree(*args: Any, **kwargs: Any) -> None:
    """Raise the `first_error` of these arguments on every rank. Return where there is none. Collective."""
    if (error := first_error(*args, **kwargs)) is not None:
        raise error


def first_error(
    mine: Exception | None = None, at: str = "", group: dist.ProcessGroup | None = None, *, local: bool = False
) -> Exception | None:
    """The first error of the ranks of `group`; None where no rank has one. Collective.

    A rank whose own error is the same one gets its own. One that fails between messages comes here with its error, and
    the others with None where the next message is. Where some of them do not come, they wait in another message. Then
    this rank raises its error alone, which ends the wait of the others. `at` is where this rank is, equal on ranks
    without an error. Code before it that is `local` has no messages: all ranks come then, however long that takes.
    """
    if not dist.is_initialized() or talk.job_store() is None:  # no other rank answers in a dry run
        return mine
    if not local and not _arrived(group, wait=mine is not None):
        assert mine is not None
        mine.lightning_3d_alone = True  # type: ignore[attr-defined]
        return mine
    if talk.all_equal(at if mine is None else os.urandom(16), group) and mine is None:
        return None
    name = "" if mine is None else f"{type(mine).__name__}: {mine}"
    answers = talk.gather((at, name, None if mine is None else talk.portable(mine)), group)
    for _, first, error in answers:
        if error is not None:
            return mine if mine is not None and name == first else error
    places = "; ".join(dict.fromkeys(place for place, _, _ in answers))
    return DivergenceError(
        f"The ranks went different ways in one step ({places}), so their messages would not match. The step must not"
        " depend on the rank, on the time or on a random generator of its own."
    )


_agreements: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""A group -> the agreements that this rank has come to."""


def _arrived(group: dist.ProcessGroup | None, wait: bool) -> bool:
    """Note in the job's store that this rank has come to an agreement. Return False if others do not come in time."""
    group = group if group is not None else dist.group.WORLD
    assert group is not None
    count = _agreements[group] = _agreements.get(group, 0) + 1
    store: Any = talk.job_store()
    name = f"lightning_3d/agree/{group.group_name}"
    keys = {rank: f"{name}/{rank}" for rank in dist.get_process_group_ranks(group)}
    store.set(keys[dist.get_rank()], str(count))

    def come() -> bool:
        wanted = [*keys.values()]
        return bool(store.check(wanted) and min(map(int, store.multi_get(wanted))) >= count)

    try:
        verdict = f"{name}/verdict {count}"
        return not wait or talk.bounded(lambda: talk.decided(store, verdict, come, PATIENCE), 2 * PATIENCE)
    except (RuntimeError, talk.StoreGone):
        return False


def is_alone(error: BaseException) -> bool:
    """True where a rank raises `error` alone, while others wait in a message. No agreement is possible any more."""
    return getattr(error, "lightning_3d_alone", False) or is_communication(error)


def raise_if_alone(error: Exception) -> None:
    """Raise `error` where it must not be caught: see `is_alone`."""
    if is_alone(error):
        raise error


_BROKEN = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "caused pair closure")
"""In the texts of errors of a process group."""


def is_communication(error: BaseException) -> bool:
    """True where another rank caused `error`."""
    if isinstance(error, PeerError | dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _BROKEN)
