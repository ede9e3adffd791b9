"""Memory of the host that the process has freed and the system does not have back."""

import ctypes
import sys


def return_freed_memory() -> None:
    """Give freed memory back to the system.

    glibc keeps tensors of up to 32 MB that lie between used ones: after the module was cut, a rank of four kept the
    size of the full module (measured: 456 MB of a module of 302 MB).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
