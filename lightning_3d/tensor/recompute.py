"""Checkpoints inside of a block: backward repeats the forward in the same state.

`torch.utils.checkpoint` keeps the function to repeat, but not the state that we set around the block's forward (unsplit
or in shards, dropout, sequence split). In backward that state is gone. We save it when a checkpoint begins and restore
it around the recomputation. Hugging Face's `gradient_checkpointing_enable()` needs this.

A reentrant checkpoint is an autograd function, so late tensors among its arguments are computed when it begins.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import Any

from torch.utils import checkpoint

from lightning_3d.module.undo import UndoStack
from lightning_3d.tensor.late_tensor import compute_late

Resume = Callable[[Sequence[tuple[Any, Any]]], AbstractContextManager[None]]
"""Makes the context of the recomputation, from pairs (argument in forward, argument in backward)."""
_PLAIN = "_checkpoint_without_reentrant_generator"
_IN_TUPLE = hasattr(checkpoint, f"{_PLAIN}_impl")
"""True where the arguments of the function to repeat come in a tuple: in torch 2.14 and later."""
BEGINNINGS: tuple[tuple[Any, str], ...] = (
    (checkpoint, f"{_PLAIN}_impl" if _IN_TUPLE else _PLAIN),
    (checkpoint.CheckpointFunction, "apply"),
)
"""Functions that begin a checkpoint. Read in torch 2.13 and 2.15: `checkpoint` gets both by name at each call, also
where a library has imported `checkpoint` itself."""


class _Call:
    def __init__(self, note: Callable[[], Resume]) -> None:
        self.note, self.over = note, False


class _Here(threading.local):
    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.reentrant = 0


_here = _Here()  # of each thread, because a proof runs the ranks as threads
_lock = threading.Lock()
_replaced: list[UndoStack] = []
"""One entry for each user of the replaced functions: it puts the originals back."""


def save_states() -> Callable[[], None]:
    """Replace the functions that begin a checkpoint. Returns a function that puts them back after their last user."""
    with _lock:
        undo = _replaced[0] if _replaced else UndoStack()
        for owner, name in BEGINNINGS if not _replaced else ():
            wrapped = _noting(getattr(owner, name))
            undo.set(owner, name, staticmethod(_computing(wrapped)) if isinstance(owner, type) else wrapped)
        _replaced.append(undo)

    def restore() -> None:
        with _lock:
            last = _replaced.pop()
            if not _replaced:
                last.close()

    return restore


@contextmanager
def noted(note: Callable[[], Resume]) -> Iterator[None]:
    """Call `note` for the state of the block that runs inside, whenever a checkpoint begins."""
    call = _Call(note)
    _here.calls.append(call)
    try:
        yield
    finally:
        _here.calls.remove(call)
        call.over = True


def _computing(apply: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(apply)
    def call(*args: Any) -> Any:
        _here.reentrant += 1
        try:
            return apply(*compute_late(args))
        finally:
            _here.reentrant -= 1

    return call


def in_reentrant_checkpoint() -> bool:
    """True in the first forward of a checkpoint with `use_reentrant=True`, which records no graph."""
    return _here.reentrant > 0


def _noting(begin: Callable[..., Any]) -> Callable[..., Any]:
    """`begin` with its first argument, the function to repeat, wrapped. Its last arguments are the function's."""

    @wraps(begin)
    def noting(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not _here.calls:
            return begin(function, *args, **kwargs)
        call = _here.calls[-1]
        resumes = [each.note() for each in _here.calls]
        in_tuple = bool(args) and isinstance(args[0], tuple)  # elsewhere a flag comes first

        @wraps(function)
        def repeated(*now: Any, **named: Any) -> Any:
            if not call.over:  # a reentrant checkpoint calls in forward what it calls in backward
                return function(*now, **named)
            with ExitStack() as states:
                for resume in resumes:
                    then = args[0] if in_tuple else args[len(args) - len(now) :]
                    states.enter_context(resume(list(zip(then, now, strict=True))))
                return function(*now, **named)

        return begin(repeated, *args, **kwargs)

    return noting
