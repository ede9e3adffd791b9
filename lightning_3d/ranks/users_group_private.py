"""The default process group as the user's code sees it: the data ranks.

Code that calls `dist.all_reduce`, `dist.get_world_size` or a library's own synchronised batch norm was written for
data parallelism. It means the ranks that work on other samples. Tensor and pipeline peers work on the same samples.
With them a sum would count these twice, and ranks of other stages would not call it.

torch looks its default group up when a function is called. That look-up is replaced while a run lasts, and answers by
the code that asks: this package, Lightning and torch's own parallelism get all ranks. Replacing the group itself would
not do: torch takes the rank in any other group from it.

During a run ahead of training each rank is alone. Data ranks may run other code there, and would wait for each other.
"""

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any
from unittest.mock import patch

from torch import distributed as dist
from torch.distributed import distributed_c10d

from lightning_3d.errors import NO_PIPELINE, UnsupportedError, module_of

_torch: Any = distributed_c10d
_C10D = (distributed_c10d.__name__, "torch.distributed.c10d_logger", __name__)
_BETWEEN = (
    "torch.overrides",
    "lightning_3d.pipeline.traced_tensor",
    "lightning_3d.sandbox.interceptor",
    "lightning_3d.sandbox.silence",
    "lightning_3d.tensor.late_tensor",
    "lightning_3d.tensor.regions",
    "lightning_3d.usercode.between_steps",
)
"""Modules that call a function in place of the code that called it."""
_OWN = ("lightning_3d", "lightning", "lightning_fabric", "pytorch_lightning", "torch")
"""Packages that mean all ranks ..."""
_USERS = ("torch.distributed.nn", "torch.nn", "torch.utils.data")
"""... but for these modules, which mean what the user who calls them does."""


@dataclass(frozen=True)
class UsersGroups:
    """Groups that nothing but the user's code uses."""

    data: dist.ProcessGroup
    alone: dist.ProcessGroup
    """This rank."""


class _Now:
    groups: UsersGroups | None = None
    alone = False


def show_data_ranks(groups: UsersGroups) -> Callable[[], None]:
    """Let the user's code see `groups.data` as its default group; returns a function that undoes it."""
    before, _Now.groups = _Now.groups, groups
    if before is not None:  # a run within a run
        return lambda: setattr(_Now, "groups", before)
    plain = _torch._get_default_group, _torch._canonicalize_group_rank, _torch._WorldMeta.WORLD
    _torch._get_default_group = lambda: _default_group(plain[0])
    _torch._canonicalize_group_rank = lambda *args, **kwargs: _group_rank(plain[1], *args, **kwargs)
    _torch._WorldMeta.WORLD = property(lambda owner: _world(plain[2].fget, owner), plain[2].fset)

    def undo() -> None:
        _Now.groups = None
        _torch._get_default_group, _torch._canonicalize_group_rank, _torch._WorldMeta.WORLD = plain

    return undo


def alone() -> AbstractContextManager[Any]:
    """Let the user's code see this rank only: no other one runs it at the same time."""
    return patch.object(_Now, "alone", True)


def users_group() -> dist.ProcessGroup | None:
    """The group that the user's code means without naming one; None where that is torch's default."""
    shown = _Now.groups
    return None if shown is None else shown.alone if _Now.alone else shown.data


def _default_group(plain: Callable[[], Any]) -> Any:
    entry, caller = _call(sys._getframe(2))
    named = entry.f_locals.get("group")
    # nobody but own code passes the group of all ranks to torch.distributed.nn, which is between it and the look-up
    between = module_of(caller).startswith("torch.distributed.nn")
    explicit = named is not None and (between or named is not _torch._world.default_pg)
    if explicit or not _is_users(caller):
        return plain()
    if entry.f_code.co_name.startswith(("new_", "split_group")):
        raise UnsupportedError(
            f"{caller.f_code.co_name} ({caller.f_code.co_filename}:{caller.f_lineno}) makes a process group during"
            " training. Its ranks would be counted among all ranks, of which tensor and pipeline peers work on the same"
            " samples. Without a group torch.distributed uses the data ranks; use that, or only data parallelism and"
            f" ZeRO (tensor_parallel_size=1, {NO_PIPELINE})."
        )
    return users_group()


def _group_rank(plain: Callable[..., int], group: Any, *args: Any, **kwargs: Any) -> int:
    """A root or a peer: a number among the data ranks where the group is theirs."""
    if _Now.groups is not None and group in (_Now.groups.data, _Now.groups.alone) and args and args[0] is not None:
        peer, *rest = args
        peer = 0 if _Now.alone else peer
        args = (None, peer if rest[:1] in ([], [None]) else rest[0], *rest[1:])
    return plain(group, *args, **kwargs)


def _world(plain: Callable[[Any], Any], owner: Any) -> Any:
    caller = sys._getframe(2)
    return users_group() if plain(owner) is not None and _is_users(caller) else plain(owner)


def _call(frame: FrameType) -> tuple[FrameType, FrameType]:
    """The function of torch.distributed that `frame` is in, and the code that called it."""
    entry = frame
    while frame.f_back is not None and frame.f_globals.get("__name__") in (*_C10D, *_BETWEEN):
        if frame.f_globals["__name__"] == distributed_c10d.__name__:
            entry = frame
        frame = frame.f_back
    return entry, frame


def users_line(calls: Iterable[tuple[FrameType, int]]) -> str | None:
    """The line of code that made a call of torch.distributed, from `calls`, the innermost first; None without one."""
    for frame, line in calls:
        name = module_of(frame)
        if name not in (*_C10D, *_BETWEEN) and not name.startswith((*_USERS, "torch.autograd")):
            return f"{frame.f_code.co_filename}:{line} ({frame.f_code.co_name})" if _is_users(frame) else None
    return None


def _is_users(caller: FrameType) -> bool:
    return _is_users_module(module_of(caller))


@cache  # asked some hundred times in a step
def _is_users_module(name: str) -> bool:
    return name not in _C10D and (name.partition(".")[0] not in _OWN or name.startswith(_USERS))
