"""What ranks learn of each other through the job's store, beside any collective, so that no one waits in vain."""

import time
from collections import Counter

from torch import distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lightning_3d.errors import PeerError

PATIENCE = 60.0
"""Seconds that a rank waits for the others to ask for the same thing."""
PATIENCE_AFTER_ERROR = 5.0
"""Seconds that a failing rank waits for the others to fail too."""
_occasions: Counter[tuple[object, str]] = Counter()
"""How often each thing was met for, so that every occasion has a key of its own in the store."""


def meet(what: str) -> None:
    """Return once every rank is here for `what`; raise a PeerError that names those that did not come."""
    missing = _missing(what, PATIENCE)
    if missing:
        raise PeerError(
            f"{what} was called on rank {dist.get_rank()} but not on rank {', '.join(map(str, missing))} within"
            f" {PATIENCE:.0f} s. What is sharded is gathered from all ranks, so call it on every rank and, where only"
            " one should write, write on rank 0."
        )


def all_failed() -> bool:
    """Whether every rank raises now.

    After an error that all ranks raise (a user's mistake) the process group is in step and clean-up may still use it;
    after an error of one rank alone it must not.
    """
    if not dist.is_initialized():
        return False
    occasion = _occasions[id(_get_default_store()), "failure"]
    mine = "apart" if _missing("failure", PATIENCE_AFTER_ERROR) else "together"
    try:
        # who decides first decides for all: a rank may come just when another gives up
        verdict = _get_default_store().compare_set(f"lightning_3d/verdict/{occasion}", "", mine)
    except RuntimeError:
        return False  # the rank that serves the store is gone
    return bool(verdict == b"together")


def leave() -> None:
    """Forget the process group, which is out of step, so that a later run in this process starts afresh.

    Peers that wait for this rank are freed when its process ends, as it does with the error that brought it here.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def _missing(what: str, patience: float) -> list[int]:
    """Ranks that did not announce `what` in time."""
    store, world = _get_default_store(), dist.get_world_size()
    occasion = _occasions[id(store), what]
    _occasions[id(store), what] += 1
    keys = [f"lightning_3d/{what}/{occasion}/{rank}" for rank in range(world)]
    try:
        store.set(keys[dist.get_rank()], "here")
        deadline = time.monotonic() + patience
        while not store.check(keys):
            if time.monotonic() > deadline:
                return [rank for rank, key in enumerate(keys) if not store.check([key])]
            time.sleep(0.002)
    except RuntimeError:
        return [rank for rank in range(world) if rank != dist.get_rank()]  # the rank that serves the store is gone
    return []
