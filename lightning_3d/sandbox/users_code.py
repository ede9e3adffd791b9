"""`is_users`: the user's functions and classes, as opposed to those of torch and Lightning."""

from functools import partial
from typing import Any

LIBRARIES = {"lightning", "lightning_3d", "numpy", "torch", "torchmetrics"}


def is_users(code: Any) -> bool:
    """Return True for a function or a class that none of `LIBRARIES` defines. Other libraries count as the user."""
    while isinstance(code, partial):
        code = code.func
    origin = getattr(code, "__module__", None) or type(code).__module__
    return origin.partition(".")[0] not in LIBRARIES
