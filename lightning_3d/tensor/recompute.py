"""Checkpoints inside of a block: what backward computes again is computed as it was in forward.

`torch.utils.checkpoint` keeps a function that the block's code gave it, and not that the block was called whole, which
dropouts acted on shards or how the sequence was divided: that is over when backward comes to it. Hugging Face's
`gradient_checkpointing_enable()` is of this kind. So it is noted when a checkpoint begins, and put around the function
for backward.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

from torch.utils import checkpoint

Resume = Callable[[Sequence[tuple[Any, Any]]], AbstractContextManager[None]]
"""What to enter around the function in backward, given its arguments as they were and as they are then."""


class _Call:
    def __init__(self, note: Callable[[], Resume]) -> None:
        self.note, self.over = note, False


class _Here(threading.local):
    def __init__(self) -> None:
        self.calls: list[_Call] = []


_here = _Here()  # a proof runs the ranks as threads


class _CheckpointsNoted:
    """torch's two functions that begin a checkpoint, replaced while some thread runs a block, and only then.

    Read in torch 2.13: `checkpoint` looks both up when it is called, also where a library has kept `checkpoint` itself.
    """

    def __init__(self) -> None:
        self.lock, self.blocks = threading.Lock(), 0
        self.generator: Any = None

    def __enter__(self) -> None:
        torchs: Any = checkpoint
        with self.lock:
            self.blocks += 1
            if self.blocks == 1:
                self.generator = torchs._checkpoint_without_reentrant_generator
                torchs._checkpoint_without_reentrant_generator = _noting(self.generator)
                torchs.CheckpointFunction.apply = staticmethod(_noting(torchs.CheckpointFunction.apply))

    def __exit__(self, *_: object) -> None:
        torchs: Any = checkpoint
        with self.lock:
            self.blocks -= 1
            if self.blocks == 0:
                torchs._checkpoint_without_reentrant_generator = self.generator
                del torchs.CheckpointFunction.apply  # the base class has it


_checkpoints_noted = _CheckpointsNoted()


@contextmanager
def noted(note: Callable[[], Resume]) -> Iterator[None]:
    """A block runs inside, and `note` says how when a checkpoint begins."""
    call = _Call(note)
    _here.calls.append(call)
    try:
        with _checkpoints_noted:
            yield
    finally:
        _here.calls.remove(call)
        call.over = True


def _noting(begin: Callable[..., Any]) -> Callable[..., Any]:
    """`begin`, which keeps its first argument for backward; the last ones are what that is called with."""

    @wraps(begin)
    def noting(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not _here.calls:
            return begin(function, *args, **kwargs)
        call = _here.calls[-1]
        resume = call.note()

        @wraps(function)
        def repeated(*now: Any, **named: Any) -> Any:
            if not call.over:  # a reentrant checkpoint calls in forward what it calls in backward
                return function(*now, **named)
            with resume(list(zip(args[len(args) - len(now) :], now, strict=True))):
                return function(*now, **named)

        return begin(repeated, *args, **kwargs)

    return noting
