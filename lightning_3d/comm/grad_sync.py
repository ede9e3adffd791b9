"""The ways to send gradients along the data axis, and the user's choice of one.

`Hierarchical`: a ring inside each node, then one between nodes. Slow links carry 1 / (ranks per node) of a buffer.
Gradients that are compressed are added exactly inside a node, and encoded where they leave it: links inside are fast,
and an encoding costs more time there than it saves.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.axes.group import Group, single
from lightning_3d.axes.ledger import Ledger
from lightning_3d.axes.ring import Pieces
from lightning_3d.axes.ring_wire import RingWire
from lightning_3d.comm.compression import CODECS, Codec, Compression, Elementwise, PowerSGD, fp32_rows
from lightning_3d.errors import ConfigurationError, LayoutError, check_one_of
from lightning_3d.faults import flight
from lightning_3d.layout import POWERSGD_RANK
from lightning_3d.layout import GradCompression as GradCompression
from lightning_3d.ranks.process_groups_private import timeout_of

GradSync = Literal["ring", "native", "hierarchical"]
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

    Ranks of one node are next to each other in `group`. Messages inside nodes and between nodes count separately.
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


class BetweenNodes(Elementwise):
    """The codec's messages go between ranks in the same place of each node, the exact ones inside the node.

    Each rank encodes the part of the node's sum that it sends, which is 1 / (ranks per node) of the gradients.
    """

    def __init__(self, collectives: Hierarchical, codec: Codec) -> None:
        super().__init__(collectives.between, codec)
        self.inside = collectives.inside

    def all_reduce(self, gradients: Sequence[Tensor], keys: Sequence[str]) -> None:
        parts = torch.cat([fp32_rows(gradient, self.inside.size) for gradient in gradients], dim=1)
        widths = [-(-gradient.numel() // self.inside.size) for gradient in gradients]
        own = self._sum_inside(parts)
        super().all_reduce(own.split(widths), keys)
        self.inside.all_gather(parts.view(-1), own)
        for gradient, average in zip(gradients, parts.split(widths, dim=1), strict=True):
            gradient.copy_(average.reshape(-1)[: gradient.numel()].view(gradient.shape))

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], keys: Sequence[str], widths: Sequence[int]
    ) -> None:
        nodes, size = self.collectives.size, self.inside.size
        # rank (node, place) is to get shard node * size + place: each place first sums its shards of every node
        places = [piece.view(nodes, size, -1).transpose(0, 1).reshape(size, -1).float() for piece in inputs]
        own = self._sum_inside(torch.cat(places, dim=1))
        super().reduce_scatter(outputs, own.split([nodes * output.numel() for output in outputs]), keys, widths)

    def _sum_inside(self, parts: Tensor) -> Tensor:
        """This rank's row of the average of `parts` in its node. The other rows are lost."""
        own = parts[self.inside.rank]
        self.inside.reduce_scatter(own, parts.view(-1), average=True)
        return own


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """The way that gradients (and sharded parameters) are sent along the data axis."""

    grad_sync: GradSync = "ring"
    """Our ring, the library's own collectives, or a ring inside each node and one between nodes."""
    grad_compression: GradCompression | None = None
    """Send gradients in fewer bytes. Each is lossy; the loss is added to the next step's gradient, which costs one
    fp32 copy of the gradients."""
    powersgd_rank: int = POWERSGD_RANK
    """Columns kept of each gradient matrix by "powersgd"."""
    ranks_per_node: int | None = None
    """Ranks of the data axis in one node, for "hierarchical"."""

    def __post_init__(self) -> None:
        check_one_of("grad_sync", self.grad_sync, get_args(GradSync))
        check_one_of("grad_compression", self.grad_compression, (None, *get_args(GradCompression)))
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise ConfigurationError(f"ranks_per_node={self.ranks_per_node!r} must be at least 1.")


def build_collectives(config: CommConfig, group: dist.ProcessGroup, ledger: Ledger, axis: str) -> Group:
    """Return the collectives of `config.grad_sync` over `group`, all of whose ranks must call this."""
    if config.grad_sync == "native":
        return Group(group, axis, ledger, doing=flight.doing)
    if config.grad_sync == "ring":
        return Group(group, axis, ledger, RingWire(group), flight.doing)
    if config.ranks_per_node is None:
        raise ConfigurationError('grad_sync="hierarchical" needs ranks_per_node, the data ranks in each node.')
    return Hierarchical(group, ledger, axis, config.ranks_per_node)


def build_compression(config: CommConfig, collectives: Group) -> Compression | None:
    """Return the compression that `config.grad_compression` names, with a memory of its own."""
    name = config.grad_compression
    if name is None:
        return None
    if name == "powersgd":
        return PowerSGD(collectives, config.powersgd_rank)
    if isinstance(collectives, Hierarchical) and 1 < collectives.nodes < collectives.size:
        return BetweenNodes(collectives, CODECS[name])
    return Elementwise(collectives, CODECS[name])
