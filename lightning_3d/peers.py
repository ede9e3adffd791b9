"""What a rank does when it fails: learn whether all ranks failed, and if not, free those that wait for it."""

import time

from torch import distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

PATIENCE = 5.0
"""Seconds a failing rank waits for the others to fail too."""


def all_failed(world_size: int, occasion: int) -> bool:
    """Whether every rank got here within `PATIENCE` seconds.

    An error that all ranks raise (a user's mistake) leaves the process group in step, so that clean-up may still use
    it; after an error of one rank alone it must not.

    Args:
        world_size: number of ranks.
        occasion: how many failures this process group has seen before.
    """
    if not dist.is_initialized():
        return False
    store, key = _get_default_store(), f"lightning_3d/failed/{occasion}"
    try:
        store.add(key, 1)
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if store.add(key, 0) >= world_size:
                return True
            time.sleep(0.02)
    except RuntimeError:
        return False  # the rank that serves the store is gone
    return False


def leave() -> None:
    """Close this rank's connections, so that peers waiting for it fail now and not at their timeout."""
    if dist.is_initialized():
        dist.destroy_process_group()
