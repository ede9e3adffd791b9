"""Collectives that the user's code calls, on each simulated rank: those that only some ranks reach would never end."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from traceback import walk_stack
from typing import Any, NamedTuple

import torch
from torch import distributed as dist

_CALLED_THROUGH = ("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger", "torch.distributed.nn")
_PACKAGES = ("torch", "lightning", "lightning_3d", "contextlib", "functools")
_WITHIN = ("lightning.pytorch.trainer", "lightning.pytorch.loops", "torch.nn", "torch.autograd", "torch.distributed")


class UserCall(NamedTuple):
    """One collective: its name, its line in the user's code, and the ranks of its group."""

    name: str
    line: str
    group: tuple[int, ...]


def user_call(func: Any, args: Sequence[Any]) -> UserCall | None:
    """The collective that an operation of torch's `c10d` runs, if it is the user's."""
    name = str(func).split(".")[1].strip("_")
    line = None if name.startswith(("send", "recv")) else _line()
    if line is None:
        return None
    group = next(value for value in args if isinstance(value, torch.ScriptObject))
    return UserCall(name, line, tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))))


def _line() -> str | None:
    """The line of user code that calls a collective; None where FSDP, autograd or the Trainer calls it."""
    for frame, line in walk_stack(sys._getframe(1)):
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in _PACKAGES:
            return f"{frame.f_code.co_filename}:{line}"
        if module.startswith(_WITHIN) and not module.startswith(_CALLED_THROUGH):
            return None
    return None


def unmatched(calls: Mapping[int, Sequence[UserCall]]) -> Iterator[str]:
    """Errors about collectives that some simulated ranks of a group reach and others do not, one for each group.

    Ranks may call the same collective from different lines. The first line with another collective is named.
    """
    for group in dict.fromkeys(call.group for own in calls.values() for call in own):
        members = {rank: [call for call in own if call.group == group] for rank, own in calls.items() if rank in group}
        if len({tuple(call.name for call in own) for own in members.values()}) == 1:
            continue
        longest = max(members.values(), key=len)
        at = next(
            at for at in range(len(longest)) if any(own[at : at + 1] != [longest[at]] for own in members.values())
        )
        there = [rank for rank, own in members.items() if own[at : at + 1] == [longest[at]]]
        yield (
            f"{longest[at].line}: {longest[at].name} of {len(group)} ranks is reached by {_named(there)} and not by"
            f" {_named(sorted(members.keys() - set(there)))}. The real job would wait there until its timeout. Call it"
            " on every rank, or on a group of the ranks that do."
        )


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
