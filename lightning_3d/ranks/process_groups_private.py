"""Private parts of torch: what it keeps of process groups, and those that a forked process inherits.

A fork has none of the threads that work for such a group. Its end waits for them, or crashes. So no group of the parent
may end in a forked process. Groups that were destroyed are among them as long as anything refers to them.

Read in torch 2.13.
"""

import gc
import os
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d

_torch: Any = distributed_c10d
default_store: Callable[[], Any] = _torch._get_default_store
"""The store through which the ranks of this job met."""
devices_of: Callable[[Any], list[torch.device]] = attrgetter("_device_types")
messages_of: Callable[[Any], int] = methodcaller("_get_sequence_number_for_group")
"""The number of collectives that a group has begun on this rank."""


def timeout_of(group: Any) -> timedelta | None:
    """The timeout of `group` while it waits for a peer. None in a dry run and in torch's debugging wrapper."""
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        if type(backend).__name__ in ("ProcessGroupGloo", "ProcessGroupNCCL"):
            return backend.options._timeout
    return None


def existing_groups() -> list[dist.ProcessGroup]:
    """Every process group of this process. Hold the list while forking: what is referred to does not end."""
    if not (_torch._world.pg_map or freeze_garbage_in_forks.cache_info().currsize):
        return []  # none was ever opened
    found: dict[int, dist.ProcessGroup] = {}
    values = [*_torch._world.pg_map, *gc.get_referents(*gc.get_objects())]
    while values:
        found |= {id(value): value for value in values if type(value) is dist.ProcessGroup}
        # containers of groups only, which the collector does not list
        values = gc.get_referents(*(x for x in values if type(x) in (dict, tuple) and not gc.is_tracked(x)))
    return list(found.values())


def forget_groups() -> None:
    """Let a forked process, whose parent holds `existing_groups`, begin without the process groups of its parent."""
    _torch._world = _torch._World()
    _torch._unregister_all_process_groups()


@cache
def freeze_garbage_in_forks() -> None:
    """Keep forked processes (dataloader workers) from collecting what they inherit: groups of a finished run, say."""
    os.register_at_fork(after_in_child=gc.freeze)
