"""The check that a training step changes no gathered weights: a change would be lost with the copy."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from lightning_3d.sandbox.interceptor import Interceptor
from lightning_3d.sandbox.writes import RefuseDataAssignment, RefuseWrites, step_writes

_WHY = (
    "which is lost with the copies of weights that zero_stage=1 to 3 gathers for a step. zero_stage=0 keeps it; or use"
    " a hook between steps"
)


@contextmanager
def unwritten(
    groups: Sequence[Any], names: Mapping[str, nn.Parameter], *, shards: bool, closely: bool
) -> Iterator[None]:
    """Raise where the code inside changes gathered parameters.

    Args:
        groups: FSDP2's.
        names: of the sharded parameters.
        shards: shards must not change either: those that are being gathered would be a step late.
        closely: intercept each call. Torch does not count writes through `.data`, but interception costs time.
    """
    params = [param for group in groups for param in group.fsdp_params]
    before = [_writes(param, shards) for param in params]

    def watched() -> Iterator[tuple[str, Tensor]]:
        name_of = {id(shard): name for name, shard in names.items()}
        for group in groups:
            for param in group.fsdp_params:
                if group.is_unsharded:
                    yield name_of[id(param.sharded_param)], param._unsharded_param
                if shards:
                    yield name_of[id(param.sharded_param)], param.sharded_param

    rules = RefuseWrites(watched, _WHY), RefuseDataAssignment(lambda: iter(names.items()), _WHY)
    with Interceptor(*rules) if closely else nullcontext():
        yield
    for param, (full, writes, shard) in zip(params, before, strict=True):
        now, writes_now, shard_now = _writes(param, shards)
        if shard_now != shard or (full in (None, now) and writes_now != writes):
            raise step_writes(next(name for name, item in names.items() if item is param.sharded_param), _WHY)


def _writes(param: Any, shards: bool) -> tuple[int | None, int, int]:
    """The identity of the gathered parameter, and the numbers of writes to it and, with `shards`, to the shard.

    Another tensor is gathered where a step changes the dtype. Gathering does not count as a write.
    """
    gathered = getattr(param, "_unsharded_param", None)
    shard = param.sharded_param._version if shards else 0
    return (None, 0, shard) if gathered is None else (id(gathered), gathered._version, shard)
