"""Links: groups of two neighbours of a pipeline.

NCCL runs the messages of one group in the order in which they were started: a rank's activations would wait for
gradients of its neighbour. A group for each neighbour and direction lets them pass each other. gloo needs none.
"""

import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import distributed as dist

from lightning_3d.ranks import talk

Links = Mapping[tuple[int, bool], dist.ProcessGroup]
"""(pipeline rank of the neighbour, True for gradients) -> a group of it and this rank."""

_links: weakref.WeakKeyDictionary[dist.ProcessGroup, Links] = weakref.WeakKeyDictionary()


def open_links(group: dist.ProcessGroup, device: torch.device) -> None:
    """Open and connect the links of this rank in its pipeline `group`. Every rank of the job must call it.

    All ranks open the same number of groups, because NCCL splits the communicator of the job on all ranks together. In
    a round without a neighbour a rank opens a group of itself alone.
    """
    if talk.takes_cpu_tensors(group) or group.size() == 1:
        return
    ranks, me, wait = dist.get_process_group_ranks(group), group.rank(), talk.timeout_of(group)
    links: dict[tuple[int, bool], dist.ProcessGroup] = {}
    for pairs in rounds(group.size()):
        pair = next((pair for pair in pairs if me in pair), (me,))
        for backward in (False, True):
            link = dist.new_group([ranks[at] for at in pair], wait, use_local_synchronization=True)
            if len(pair) == 2:
                links[sum(pair) - me, backward] = link
                _connect(link, device)
    _links[group] = links


def links_of(group: dist.ProcessGroup) -> Links:
    """The links that `open_links` opened for `group`; none where messages of one group pass each other."""
    return _links.get(group, {})


def rounds(size: int) -> Sequence[Sequence[tuple[int, int]]]:
    """Pairs of neighbours in a ring of `size` ranks, in rounds in which no rank is in two pairs."""
    if size == 2:
        return [[(0, 1)]]
    even = [(at, at + 1) for at in range(0, size - 1, 2)]
    odd = [(at, at + 1) for at in range(1, size - 1, 2)]
    last = [(0, size - 1)]
    return [even, odd + last] if size % 2 == 0 else [even, odd, last]


def _connect(link: dist.ProcessGroup, device: torch.device) -> None:
    """Exchange a message both ways: the first one opens the connection, which takes long."""
    mine, peer = torch.zeros(1, device=device), 1 - link.rank()
    theirs = torch.empty_like(mine)
    both = [
        dist.P2POp(dist.isend, mine, group=link, group_peer=peer),
        dist.P2POp(dist.irecv, theirs, group=link, group_peer=peer),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
