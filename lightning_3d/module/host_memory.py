"""Memory of the machine, and of the process: its peak, and what it has freed and the system does not have back."""

import ctypes
import gc
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from lightning_3d.errors import ConfigurationError

_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def bytes_in(amount: str | float, argument: str) -> int:
    """Return the bytes of `amount`, which the user gave for `argument`: "20GB", "500MB" or a number of bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B|)\s*", str(amount).upper())
    if found is None or float(found[1]) <= 0:
        raise ConfigurationError(
            f"{argument}={amount!r} is no amount of memory. Write '20GB' or '500MB', or a number of bytes."
        )
    return int(float(found[1]) * _UNITS[found[2]])


def is_on_device(tensor: Tensor) -> bool:
    """Return True for a tensor in the memory of an accelerator."""
    return tensor.device.type not in ("cpu", "meta")


_MMAP_THRESHOLD = -3
"""Number of glibc's parameter (`malloc.h`): bytes from which an allocation has pages of its own."""
_LARGE, _LARGEST = 2**20, 32 * 2**20
"""Its value inside of `own_pages`, and the one that glibc arrives at in a process with large tensors."""


@contextmanager
def own_pages() -> Iterator[None]:
    """Give each large tensor that the code inside makes pages of its own, which the system has back once it is freed.

    Of what threads free, glibc keeps the end of each thread's heap (measured: 53 MB after a proof in two threads).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, _LARGE)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _LARGEST)


@contextmanager
def quick_collections(*, after_one: bool = True) -> Iterator[None]:
    """Let collections of garbage inside look at objects that are made inside, not at all of the process.

    With the packages of a user imported, one over all objects takes 0.3 s (measured with diffusers). `after_one` makes
    one at the start: older garbage would keep its memory until the end.
    """
    if gc.get_freeze_count():  # a forked process: objects of its parent must stay frozen
        yield
        return
    if after_one:
        gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def return_freed_memory() -> None:
    """Give freed memory back to the system.

    glibc keeps the memory of tensors of up to 32 MB that lie between used ones. After a module of 302 MB was cut, a
    rank of four still had 456 MB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def peak_bytes(device: torch.device) -> int:
    """Peak memory of this process: on its GPU since training began, on a CPU since the process began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def machine_memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> float:
    """Bytes of memory that this machine's processes may use: a container may be given less than there is."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    allowed = limit.read_text().strip() if limit.is_file() else "max"
    return min(physical, int(allowed)) if allowed.isdigit() else physical
