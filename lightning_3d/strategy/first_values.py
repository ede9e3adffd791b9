"""The first values of a module: built without memory where ranks are going to have parts, equal on all ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn

from lightning_3d.axes.group import Group, broadcast_tensors
from lightning_3d.checkpoint.pretrained_private import read_on_use
from lightning_3d.ranks import talk
from lightning_3d.ranks.random_streams import drawn_like_first
from lightning_3d.sandbox.deferred import SMALL, Built, Deferred, deferring, leave_on_host, move_later, realize
from lightning_3d.sandbox.recorded_value import reads


@contextmanager
def built_in_parts() -> Iterator[Built]:
    """Build modules inside without memory for large parameters, with the random numbers of rank 0."""
    with drawn_like_first(), deferring(read_on_use) as built:
        yield built


def warn_of_full(module: nn.Module, built: Sequence[Built]) -> None:
    """Warn once of the parameters that this rank builds in full, although they were built in parts."""
    reasons = {parameter: why for each in built for parameter, why in each.in_full}
    reasons |= {
        parameter: "its value was used before training"
        for each in built
        for parameter in each.deferred
        if not isinstance(parameter, Deferred)
    }
    full = {name: reasons[parameter] for name, parameter in module.named_parameters() if parameter in reasons}
    for why in dict.fromkeys(full.values()):
        names = [name for name, reason in full.items() if reason == why]
        rank_zero_warn(
            f"Each rank builds {', '.join(names[:5])}{', ...' if names[5:] else ''} in full before it keeps a shard"
            f" ({len(names)} parameters): {why}."
        )


@torch.no_grad()
def keep_on_host(module: nn.Module, device: torch.device) -> None:
    """Leave large parameters in host memory until their parts move to `device`. Collective over the world.

    Each one has the value of rank 0 afterwards.
    """
    for parameter in module.parameters():
        if _is_on(parameter, device) or (parameter.nbytes < SMALL and not isinstance(parameter, Deferred)):
            continue
        if isinstance(parameter, Deferred):
            move_later(parameter, device)
            continue
        here = parameter.detach().to(device)
        there = here.clone()
        broadcast_tensors([there], Group())
        if not torch.equal(there, here):
            parameter.data = there.to(parameter.device)
        leave_on_host(parameter, device)


def _is_on(parameter: nn.Parameter, device: torch.device) -> bool:
    return parameter.device == device


def share_first_values(module: nn.Module) -> None:
    """Give parameters and buffers the values of rank 0, on every rank. Collective over the world.

    A deferred parameter is computed and sent only if some rank recorded other operations for it, or reads other bytes.
    """
    deferred = {name: item for name, item in module.named_parameters() if isinstance(item, Deferred)}
    mine = {name: item.lightning_3d_recorded.step.digest for name, item in deferred.items()}
    everywhere = [mine] if talk.all_equal(mine) else talk.gather(mine)
    equal = {name for name, digest in everywhere[0].items() if all(there.get(name) == digest for there in everywhere)}
    others = {name: item for name, item in deferred.items() if name not in equal}
    if any(reads(item.lightning_3d_recorded.step) for item in others.values()):
        rank_zero_warn(
            f"Ranks read other values of {', '.join([*others][:5])}{', ...' if len(others) > 5 else ''} from their"
            f" weights files ({len(others)} parameters), as from an older download on one node. All train with those of"
            " rank 0, and each builds these in full. Give each node the same files."
        )
    realize(others.values())
    here = [item for item in module.parameters() if not isinstance(item, Deferred)]
    broadcast_tensors([*here, *module.buffers()], Group())
