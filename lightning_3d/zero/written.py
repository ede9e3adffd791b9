"""Weights that a training step changes by itself while they are gathered for it: a change is lost with the copy."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_3d.local import local
from lightning_3d.writes import NoAssignment, in_place
from lightning_3d.zero.rows import my_rows

_WHY = (
    "which is lost with the copies of weights that zero_stage=1 to 3 gathers for a step. zero_stage=0 keeps it; or use"
    " a hook between steps"
)


@contextmanager
def unwritten(
    groups: Iterable[Any], names: Mapping[nn.Parameter, str], *, shards: bool, compare: bool
) -> Iterator[None]:
    """Raise where the code inside changes what is gathered.

    Args:
        groups: FSDP2's.
        names: of the sharded parameters.
        shards: whether shards must not change either: those that are being gathered would be a step late.
        compare: what is whole with the shards too, and see assignments: torch counts nothing that is done to `.data`.
    """
    assigning = NoAssignment(lambda: ((name, item) for item, name in names.items()), _WHY)
    before = {param: (_whole(param), param.sharded_param._version) for group in groups for param in group.fsdp_params}
    with assigning if compare else nullcontext():
        yield
    for group in groups:
        for param in group.fsdp_params:
            whole, shard = before[param]
            wrote = _whole(param) != whole or (shards and param.sharded_param._version != shard)
            if wrote or (compare and group.is_unsharded and _other_rows(param)):
                raise in_place(names[param.sharded_param], _WHY)


def _whole(param: Any) -> int:
    """How often the gathered parameter was written to, since it was first made. Gathering does not count."""
    whole = getattr(param, "_unsharded_param", None)
    return 0 if whole is None else int(whole._version)


def _other_rows(param: Any) -> bool:
    """Whether this rank's rows of the gathered parameter are not those of its shard, bit by bit."""
    info, shard = param.mesh_info, local(param.sharded_param).detach()
    rows = my_rows(local(param._unsharded_param).detach(), info.shard_mesh_rank, info.shard_mesh_size)
    wanted = shard.to(device=rows.device, dtype=rows.dtype)
    return not torch.equal(rows.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
