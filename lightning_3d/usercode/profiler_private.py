"""Hooks by which Lightning's `PyTorchProfiler` names modules in a trace, suspended while modules are copied.

Such a hook has open ranges of the trace, which nothing can copy. A block with them could not be run alone, and would
have no tensor plan.

Reads `_register` of the profiler (Lightning 2.6).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.profilers import PyTorchProfiler


@contextmanager
def without_module_ranges(trainer: Any) -> Iterator[None]:
    """Remove the hooks of the profiler of `trainer` inside, and put them back."""
    ranges = trainer.profiler._register if isinstance(trainer.profiler, PyTorchProfiler) else None
    if ranges is None:
        yield
        return
    ranges.__exit__(None, None, None)
    try:
        yield
    finally:
        ranges.__enter__()
