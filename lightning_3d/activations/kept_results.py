"""Selective recompute: expensive results are kept, and the recomputation of a block takes them.

Kept are the results of matrix products, convolutions, attention and our collectives. Norms, activation functions and
dropout are computed again: they are cheap, and make up most of what a block keeps.

This file has two dispatch modes of its own. torch's `create_selective_checkpoint_contexts` (2.13) raises in three
cases: a kept result was changed in place later, autocast has cached a weight, a graph has a second backward. It also
replays no collective that writes in place. Here a kept result that was changed since is computed again.
"""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch import Tensor

from lightning_3d.errors import RunError
from lightning_3d.module.torch_private import ATEN, PRODUCTS, TorchDispatchMode, same_version, schema, version_of
from lightning_3d.module.undo import replaced_attributes
from lightning_3d.sandbox.trees import leaves, map_leaves

KEPT: dict[Any, int | None] = {
    operation: next((i for i, a in enumerate(schema(operation).arguments) if a.name == "dropout_p"), None)
    for operation in (getattr(ATEN, name).default for name in PRODUCTS if hasattr(ATEN, name))
}
"""Operations whose results are kept, each with the place of its dropout rate among the arguments."""


class _Running(threading.local):
    mode: "_Mode | None" = None


_running = _Running()  # of each thread: autograd has one for each device


def kept_once(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a collective: the recomputation of a block takes its result and sends nothing."""

    @wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        mode = _running.mode
        if mode is None:
            return collective(*args, **kwargs)
        with replaced_attributes(_running, mode=None):  # a collective may be made of others
            return mode.result(collective, lambda: collective(*args, **kwargs))

    return call


class KeptResults:
    """The kept results of one forward of a block, in the order in which they were computed."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, Any]] = []

    def contexts(self) -> tuple["_Keep", "_Take"]:
        """The contexts of the forward and of its recomputation."""
        return _Keep(self), _Take(self)


class _Mode(TorchDispatchMode):
    def __init__(self, kept: KeptResults) -> None:
        super().__init__()
        self.kept = kept

    def __enter__(self) -> Any:
        self.outer, _running.mode = _running.mode, self
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _running.mode = self.outer
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not is_kept(func, args, kwargs):
            return func(*args, **kwargs)
        return self.result(func, lambda: func(*args, **kwargs))

    def result(self, what: Any, compute: Callable[[], Any]) -> Any:
        """The result of `what`, computed or taken."""
        raise NotImplementedError


class _Keep(_Mode):
    def result(self, what: Any, compute: Callable[[], Any]) -> Any:
        result = compute()
        self.kept.entries.append((what, map_leaves(_Entry.of, result)))
        return result


class _Take(_Mode):
    def __enter__(self) -> Any:
        self.place = 0  # a graph may be kept for a second backward
        return super().__enter__()

    def result(self, what: Any, compute: Callable[[], Any]) -> Any:
        entries = self.kept.entries
        if self.place >= len(entries) or entries[self.place][0] is not what:
            raise RunError(
                f"Backward computes a block again with recompute='selective', and {what} is not what the forward"
                " computed there. The block runs differently when it runs again: it reads a value that changes between"
                " the two. Use recompute=None for this module."
            )
        _, result = entries[self.place]
        self.place += 1
        return compute() if any(map(_Entry.changed, leaves(result))) else map_leaves(_Entry.taken, result)


class _Entry:
    """A kept tensor, which the code after it may change in place."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = same_version(tensor), version_of(tensor)

    @staticmethod
    def of(leaf: Any) -> Any:
        return _Entry(leaf) if isinstance(leaf, Tensor) else leaf

    @staticmethod
    def taken(leaf: Any) -> Any:
        return same_version(leaf.tensor) if isinstance(leaf, _Entry) else leaf

    @staticmethod
    def changed(leaf: Any) -> bool:
        return isinstance(leaf, _Entry) and version_of(leaf.tensor) != leaf.version


def is_kept(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True for an operation whose results are kept.

    Those of attention with dropout are not: without its draw, later masks of the recomputation would differ.
    """
    if func not in KEPT:
        return False
    place = KEPT[func]
    return not kwargs.get("dropout_p", args[place] if place is not None and place < len(args) else 0.0)
