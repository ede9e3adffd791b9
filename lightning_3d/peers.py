"""What ranks learn of each other through the job's store, beside any collective, so that no one waits in vain."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lightning_3d.errors import PeerError

T = TypeVar("T")
PATIENCE = 60.0
"""Seconds that a rank waits for the others to ask for the same thing."""
PATIENCE_AFTER_ERROR = 5.0
"""Seconds that a failing rank waits for the others to fail too."""


def meet(what: str, ranks: Sequence[int] | None = None) -> None:
    """Return once every rank, or each of `ranks`, is here for `what`; raise a PeerError that names those that did not
    come."""
    store: Any = _get_default_store()
    patience = min(PATIENCE, store.timeout.total_seconds())
    missing = _missing(what, patience, range(dist.get_world_size()) if ranks is None else ranks)
    if missing:
        raise PeerError(
            f"{what} was called on rank {dist.get_rank()} but not on rank {', '.join(map(str, missing))} within"
            f" {patience:.0f} s. What is sharded is gathered from all ranks, so call it on every rank and, where only"
            " one should write, write on rank 0."
        )


def meet_first(what: str, ranks: Sequence[int], met: set[str]) -> None:
    """`meet`, unless `what` is among what they have `met` for before: who comes alone later is not waited for."""
    if what not in met:
        met.add(what)
        meet(what, ranks)


def all_failed(in_step: bool) -> bool:
    """Whether every rank raises now, for a reason of its own.

    After an error that all ranks raise (a user's mistake) the process group is in step and clean-up may still use it;
    after an error of one rank alone, or one that the group itself raised, it must not.

    Args:
        in_step: whether this rank's error came from elsewhere than the process group.
    """
    if not dist.is_initialized():
        return False
    store, mine = _get_default_store(), dist.get_rank()

    def agree() -> bool:
        occasion = _occasion(store, "failure", mine)
        keys = [f"lightning_3d/failure/{occasion}/{rank}" for rank in range(dist.get_world_size())]
        verdict = f"lightning_3d/verdict/{occasion}"
        store.set(keys[mine], "here")
        deadline = time.monotonic() + PATIENCE_AFTER_ERROR
        together = False
        while in_step and not together and not store.check([verdict]) and time.monotonic() < deadline:
            together = store.check(keys)
            time.sleep(0.002)
        # who decides first decides for all: a rank may come just when another gives up
        return bool(store.compare_set(verdict, "", "together" if together else "apart") == b"together")

    try:
        return bounded(agree, 2 * PATIENCE_AFTER_ERROR)
    except (RuntimeError, StoreGone):
        return False  # the rank that serves the store is gone


def leave() -> None:
    """Forget the process group, which is out of step, so that a later run in this process starts afresh.

    Peers that wait for this rank are freed when its process ends, as it does with the error that brought it here.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def bounded(question: Callable[[], T], seconds: float) -> T:
    """The answer to something asked of the store, which never answers while the process that serves it is stopped.

    Raises StoreGone after `seconds`, and what `question` raises.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            answers.append(question())
        except BaseException as error:  # raised again where it was asked
            errors.append(error)

    thread = threading.Thread(target=ask, name="lightning_3d.ask", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise StoreGone(f"the job's store did not answer for {seconds:.0f} s")
    return answers[0]


class StoreGone(Exception):
    """The process that serves the store is stopped or cannot be reached."""


def _missing(what: str, patience: float, ranks: Sequence[int]) -> list[int]:
    """Those of `ranks` that did not announce `what` in time."""
    store: Any = _get_default_store()
    mine = dist.get_rank()

    def announce() -> list[int]:
        occasion = _occasion(store, what, mine)
        keys = {rank: f"lightning_3d/{what}/{occasion}/{rank}" for rank in ranks}
        store.set(keys[mine], "here")
        deadline = time.monotonic() + patience
        while not store.check([*keys.values()]):
            if time.monotonic() > deadline:
                return [rank for rank, key in keys.items() if not store.check([key])]
            time.sleep(0.002)
        return []

    try:
        return bounded(announce, patience + 5.0)
    except (RuntimeError, StoreGone):
        return [rank for rank in ranks if rank != mine]  # the rank that serves the store is gone


def _occasion(store: Any, what: str, rank: int) -> int:
    """How often this rank has met for `what`, so that every occasion has keys of its own in the store."""
    return int(store.add(f"lightning_3d/{what}/count/{rank}", 1))
