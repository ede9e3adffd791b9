"""Weights that a training step changes by itself while they are gathered for it: a change is lost with the copy."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_3d.sandbox.writes import RefuseDataAssignment, in_place, no_writes

_WHY = (
    "which is lost with the copies of weights that zero_stage=1 to 3 gathers for a step. zero_stage=0 keeps it; or use"
    " a hook between steps"
)


@contextmanager
def unwritten(
    groups: Sequence[Any], names: Mapping[str, nn.Parameter], *, shards: bool, closely: bool
) -> Iterator[None]:
    """Raise where the code inside changes what is gathered.

    Args:
        groups: FSDP2's.
        names: of the sharded parameters.
        shards: whether shards must not change either: those that are being gathered would be a step late.
        closely: look at each call. Torch does not count what is done to `.data`, but a look costs time.
    """
    params = [param for group in groups for param in group.fsdp_params]
    before = {param: (_writes(param), param.sharded_param._version) for param in params}

    def watched(names_of: Mapping[nn.Parameter, str]) -> Iterator[tuple[str, Tensor]]:
        for group in groups:
            for param in group.fsdp_params:
                if group.is_unsharded:
                    yield names_of[param.sharded_param], param._unsharded_param
                if shards:
                    yield names_of[param.sharded_param], param.sharded_param

    with ExitStack() as stack:
        if closely:
            stack.enter_context(no_writes(partial(watched, {item: name for name, item in names.items()}), _WHY))
            stack.enter_context(RefuseDataAssignment(lambda: iter(names.items()), _WHY))
        yield
    for param in params:
        whole, shard = before[param]
        if _writes(param) != whole or (shards and param.sharded_param._version != shard):
            raise in_place(next(name for name, item in names.items() if item is param.sharded_param), _WHY)


def _writes(param: Any) -> int:
    """How often the gathered parameter was written to, since it was first made. Gathering does not count."""
    whole = getattr(param, "_unsharded_param", None)
    return 0 if whole is None else int(whole._version)
