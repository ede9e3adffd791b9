"""What ranks tell each other beside the data: a few integers, at once, out of the engine's order."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

_TAG = 1
"""The ring's messages have tag 0, so the two never mix, even on one group and from two threads."""


def exchange(message: Tensor, group: dist.ProcessGroup, tag: int = _TAG) -> Tensor:
    """Every rank's `message` (a CPU tensor of one shape on all ranks), one row per rank.

    Point to point, so it can run while the engine runs collectives on the same group. The group needs a CPU backend
    (start the job's process group with "cpu:gloo,cuda:nccl").
    """
    size, rank = group.size(), group.rank()
    table = message.new_empty((size, *message.shape))
    table[rank] = message
    peers = [peer % size for peer in range(rank + 1, rank + size)]
    works = [dist.irecv(table[peer], group=group, group_src=peer, tag=tag) for peer in peers]
    works += [dist.isend(message, group=group, group_dst=peer, tag=tag) for peer in peers]
    for work in works:
        assert work is not None
        work.wait()
    return table


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long `group` waits for a peer; None where no gloo is behind it (a dry run, torch's debugging wrapper)."""
    backend = group._get_backend(torch.device("cpu"))
    return backend.options._timeout if isinstance(backend, dist.ProcessGroupGloo) else None
