"""`one_block_at_a_time`: trial runs of a module that may be larger than the device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from lightning_3d.activations.recompute_blocks import recompute_blocks
from lightning_3d.activations.recompute_choice import Recompute
from lightning_3d.module.undo import UndoStack
from lightning_3d.sandbox.deferred import computed_on_use, is_deferred

Context = Callable[[], AbstractContextManager[Any]]


@contextmanager
def one_block_at_a_time(module: nn.Module, blocks: Sequence[str], context: Context) -> Iterator[Context]:
    """Let the code inside train `module`, of which some parameters may be deferred. Yields the context of its steps.

    A module that is built in parts may not fit, and so may its activations and its weights in half precision. Backward
    computes each of its blocks again.
    """
    if not is_deferred(module):
        yield context
        return
    with computed_on_use(module), UndoStack() as undo:
        recompute_blocks(module, blocks, Recompute("full"), undo)
        yield lambda: _uncached(context)


@contextmanager
def _uncached(context: Context) -> Iterator[None]:
    """Enter `context`, in which autocast would keep each weight that it has cast until the end."""
    cached = torch.is_autocast_cache_enabled()
    with context():
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(cached)
