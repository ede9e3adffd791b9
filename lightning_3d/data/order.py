"""The order of the samples of an epoch, described by plain values, and drawn again from them.

With several data ranks Lightning replaces the user's sampler by its own. With one data rank the user's stays, and
samples come as on one device. A run that resumes inside an epoch with another number of data ranks ends that epoch in
its first order. Once a run has had several data ranks, it keeps their order.
"""

import copy
from typing import Any

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

Order = dict[str, Any]
"""The source of an order besides random streams: its `kind` and, if shared, `seed` and `shuffle`."""


def is_shared(sampler: object) -> bool:
    """Return True if the data ranks share one order, of which each takes its share."""
    return type(sampler) in (DistributedSampler, DistributedSamplerWrapper)


def order_of(sampler: Any) -> Order:
    """The order of the epoch that `sampler` gives now."""
    if is_shared(sampler):
        return {"kind": "shared", "seed": sampler.seed, "shuffle": sampler.shuffle}
    if type(sampler) is SequentialSampler:
        return {"kind": "sequential"}
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return {"kind": "random"}
    return {"kind": "own"}


def can_draw(sampler: object, order: Order) -> bool:
    """Return True if `full_order` can draw `order`, begun under another number of data ranks, with this sampler."""
    kinds = {"shared": (DistributedSampler, DistributedSamplerWrapper), "own": (DistributedSamplerWrapper,)}
    return type(sampler) in kinds.get(order["kind"], (DistributedSampler,))


def full_order(sampler: Any, order: Order, generator: torch.Generator | None) -> list[Any]:
    """All samples of the epoch in their order. Draws from the main random streams, which must be as they were.

    Args:
        sampler: the one of now.
        order: for which `can_draw`.
        generator: in the state that the user's own had, where the order was drawn from one.
    """
    if order["kind"] == "own":
        return list(sampler.dataset._sampler)
    if order["kind"] != "shared":
        data = sampler.dataset
        return list(RandomSampler(data, generator=generator) if order["kind"] == "random" else SequentialSampler(data))
    alone = copy.copy(sampler)
    alone.num_replicas, alone.rank = 1, 0
    alone.num_samples = alone.total_size = len(sampler.dataset)
    return list(alone)
