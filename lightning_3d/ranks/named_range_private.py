"""Named ranges in a trace of torch's profiler.

No public name of torch says that a profiler is active (read in torch 2.13).
"""

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

_NONE: AbstractContextManager[None] = nullcontext()


def named_range(name: str) -> AbstractContextManager[None]:
    """A range of the trace, as long as the context lasts. Without a profiler, nothing."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else _NONE
