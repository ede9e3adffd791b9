"""Process groups that a forked process inherits, without the threads that work for them.

The end of such a group waits for its threads, or crashes. So no group of the parent may end in a forked process. Groups
that were destroyed are among them as long as anything refers to them.

Read in torch 2.13: `_world`, `_World` and `_unregister_all_process_groups`.
"""

import gc
import os
from functools import cache
from typing import Any

from torch import distributed as dist
from torch.distributed import distributed_c10d

_torch: Any = distributed_c10d


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
