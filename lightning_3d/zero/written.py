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
    before = [(_gathered(param), _writes(param), param.sharded_param._version) for param in params]

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
        written = full in (None, _gathered(param)) and _writes(param) != writes
        if written or (shards and param.sharded_param._version != shard):
            raise step_writes(next(name for name, item in names.items() if item is param.sharded_param), _WHY)


def _gathered(param: Any) -> int | None:
    """Which tensor is gathered: another one where a step changes the dtype."""
    full = getattr(param, "_unsharded_param", None)
    return None if full is None else id(full)


def _writes(param: Any) -> int:
    """The number of writes to a gathered parameter since it was first gathered. Gathering does not count."""
    gathered = getattr(param, "_unsharded_param", None)
    return 0 if gathered is None else int(gathered._version)
