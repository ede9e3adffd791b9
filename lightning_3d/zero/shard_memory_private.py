"""The memory of FSDP2's shards, and the moments in which a gather reads it.

Read in torch 2.11 and 2.13, as fsdp_private.py.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_3d.offload.disk_tensors import without_base


def shard_memory(param: Any) -> tuple[Tensor, Tensor]:
    """Return the memory of a shard, with the rows that pad it, and the shard in it, from now on no views."""
    param._sharded_param_data = without_base(param._sharded_param_data)
    param.sharded_param._local_tensor = without_base(param.sharded_param._local_tensor)
    return param._sharded_param_data, param.sharded_param._local_tensor


def around_gather(group: Any, before: Callable[[Any], None], after: Callable[[Any], None]) -> None:
    """Call `before(group)` before its shards are read for a gather, and `after(group)` once they are not needed."""
    unshard, wait = group.unshard, group.wait_for_unshard
    alone = group._all_gather_process_group.size() == 1  # FSDP2 copies it, and only while it waits

    def starts(async_op: bool = False) -> None:
        if not alone and group._all_gather_result is None and not group.is_unsharded:
            before(group)
        unshard(async_op)

    def ends() -> None:
        if alone and group._all_gather_result is not None:
            before(group)
        wait()
        after(group)

    group.unshard, group.wait_for_unshard = starts, ends
