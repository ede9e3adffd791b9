"""A ring inside each node, then one between nodes: slow links carry 1 / (ranks per node) of the buffer."""

import weakref

import torch.distributed as dist

from lightning_3d.axes.group import Group, single
from lightning_3d.axes.ledger import Ledger
from lightning_3d.axes.ring import Pieces
from lightning_3d.axes.ring_wire import RingWire
from lightning_3d.errors import LayoutError
from lightning_3d.faults import flight
from lightning_3d.ranks.talk import timeout_of

_parts_of: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, list[dist.ProcessGroup]]]
_parts_of = weakref.WeakKeyDictionary()
"""A group -> ranks per node -> its parts inside this node and between nodes: opened once, however many runs use it."""


def _open_parts(group: dist.ProcessGroup, ranks_per_node: int) -> list[dist.ProcessGroup]:
    ranks, wait = dist.get_process_group_ranks(group), timeout_of(group)
    node, place = divmod(group.rank(), ranks_per_node)
    peers, alike = ranks[node * ranks_per_node : (node + 1) * ranks_per_node], ranks[place::ranks_per_node]
    return [dist.new_group(part, wait, use_local_synchronization=True) for part in (peers, alike)]


class Hierarchical(Group):
    """Reduce-scatter inside the node, then between nodes; all-gather the other way round.

    Args:
        group: all ranks, those of one node next to each other. Every one of them must build its `Hierarchical`.
        ledger: counts messages inside nodes and between nodes separately (`axis.inside`, `axis.between`).
        ranks_per_node: must divide the size of `group`.
    """

    def __init__(self, group: dist.ProcessGroup, ledger: Ledger, axis: str, ranks_per_node: int) -> None:
        super().__init__(group, axis, ledger)
        self.begins = False
        if self.size % ranks_per_node:
            raise LayoutError(
                f'grad_sync="hierarchical" with {ranks_per_node} ranks per node cannot cover {self.size} ranks evenly.'
                ' Set ranks_per_node to a divisor, or use grad_sync="ring".'
            )
        self.nodes = self.size // ranks_per_node
        parts = _parts_of.setdefault(group, {})
        if ranks_per_node not in parts:
            parts[ranks_per_node] = _open_parts(group, ranks_per_node)
        self.inside, self.between = (
            Group(part, f"{axis}.{where}", ledger, RingWire(part), flight.doing)
            for part, where in zip(parts[ranks_per_node], ("inside", "between"), strict=True)
        )

    def reduce_scatter(self, output: Pieces, input: Pieces, *, average: bool = False) -> None:
        output, input = single(output), single(input)
        # Rank (node, place) is to get part node * ranks_per_node + place: each place first sums that of every node.
        part = output.new_empty(self.nodes, output.numel())
        self.inside.reduce_scatter(part.unbind(0), input.view(self.nodes, -1).unbind(0), average=average)
        self.between.reduce_scatter(output, part, average=average)

    def all_gather(self, output: Pieces, input: Pieces) -> None:
        output, input = single(output), single(input)
        part = input.new_empty(self.nodes, input.numel())
        self.between.all_gather(part, input)
        self.inside.all_gather(output.view(self.nodes, -1).unbind(0), part.unbind(0))

    def all_reduce(self, buffer: Pieces, *, average: bool = False) -> None:
        size, flat = self.inside.size, single(buffer).view(-1)
        padded = flat
        if rest := -flat.numel() % size:
            padded = flat.new_zeros(flat.numel() + rest)
            padded[: flat.numel()] = flat
        own = padded.view(size, -1)[self.inside.rank]
        self.inside.reduce_scatter(own, padded, average=average)
        self.between.all_reduce(own, average=average)
        self.inside.all_gather(padded, own)
        if rest:
            flat.copy_(padded[: flat.numel()])
