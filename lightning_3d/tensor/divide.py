"""Which part of each parameter a rank needs, measured: its share of a row-split product's input is sent backward, and
where gradients are exactly zero nothing is needed.

So fused, interleaved, grouped or transposed layouts need no names and no guesses: the gradient shows which rows of a
q/k/v
matrix the first half of the heads depends on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_3d.tensor.geometry import Interval, TensorSplit
from lightning_3d.tensor.regions import Flow, Region

Touched = dict[str, list[list[Tensor]]]
"""For each parameter and each rank, for each dimension, which indices have a gradient."""
INPUT = "argument "
"""Prefix that tells arguments of the block from its parameters."""


@dataclass(frozen=True)
class Division:
    """How one region can be divided."""

    splits: Mapping[str, TensorSplit]
    """Parameters that fall apart into one part for each rank."""
    slices: Mapping[str, TensorSplit]
    """Parameters of column products whose parts overlap."""
    summed: tuple[str, ...]
    """Parameters that every rank needs whole."""
    shared: tuple[str, ...]
    """Parameters added at the end of the region: biases of row-split products."""
    inputs: Mapping[int, TensorSplit | None]
    """Arguments of the block: whole, or the part of each rank."""
    folded: tuple[int, ...] = ()
    """Arguments whose split is that of one row: rows and heads are folded into one dimension."""

    @property
    def fractions(self) -> list[tuple[tuple[int, int], ...]]:
        """For each distinct way of dividing: (part, whole) on each rank."""
        ways = []
        for split in (*self.splits.values(), *self.slices.values()):
            ways.append(tuple((split.local_size(rank), split.size) for rank in range(split.ranks)))
        return list(dict.fromkeys(ways))


def measure(
    flow: Flow,
    region: Region,
    inputs: Sequence[Tensor],
    parameters: Mapping[str, Tensor],
    dim: int,
    unit: int,
    ranks: int,
    generator: torch.Generator,
) -> Touched | None:
    """What each rank touches when dimension `dim` of what `region`'s sinks take is dealt out in multiples of `unit`."""
    own = {name: parameters[name] for sink in region.sinks for name in sink}
    names = dict.fromkeys((*(name for site in region.sources for name in site), *region.inner))
    upstream = {name: parameters[name] for name in names if name not in own}
    upstream |= {f"{INPUT}{index}": inputs[index] for index in region.inputs if inputs[index].requires_grad}
    touched: Touched = {name: [] for name in (*upstream, *own)}
    for rank in range(ranks):
        dealt = _deal(flow, region, dim, unit, rank, ranks)
        if dealt is None:
            return None
        _collect(touched, dealt[0], upstream, generator)
        _collect(touched, dealt[1], own, generator)
    return touched


def merge(ours: Touched, theirs: Touched) -> Touched:
    """What either run touched."""
    pairs = {name: zip(ours[name], theirs[name], strict=True) for name in ours}
    return {
        name: [[a | b for a, b in zip(mine, other, strict=True)] for mine, other in pair]
        for name, pair in pairs.items()
    }


def _deal(
    flow: Flow, region: Region, dim: int, unit: int, rank: int, ranks: int
) -> tuple[list[Tensor], list[Tensor]] | None:
    """`rank`'s share of each sink's input, as computed and as the product turns it into an output."""
    backward, forward = [], []
    for sink in region.sinks:
        for call in flow.calls.get(sink, ()):  # an expert that no token went to in this run has none
            if -dim > call.before.dim():
                return None
            size = call.before.shape[dim]
            if size % unit or size // unit < ranks:
                return None
            start, stop = TensorSplit.even(0, size, ranks, unit=unit).pieces[rank][0]
            mask = torch.zeros(size, *(1,) * (-dim - 1))
            mask[start:stop] = 1
            backward.append(call.before * mask)
            forward.append(call.again(call.leaf.detach() * mask))
    return backward, forward


def _collect(touched: Touched, probes: list[Tensor], targets: Mapping[str, Tensor], generator: torch.Generator) -> None:
    if not targets:
        return
    if not probes:
        for name, target in targets.items():
            touched[name].append([torch.zeros(size, dtype=torch.bool) for size in target.shape])
        return
    total = torch.stack([(probe * torch.randn(probe.shape, generator=generator)).sum() for probe in probes]).sum()
    grads = torch.autograd.grad(total, list(targets.values()), retain_graph=True, allow_unused=True)
    for (name, target), grad in zip(targets.items(), grads, strict=True):
        hit = torch.zeros(target.shape, dtype=torch.bool) if grad is None else grad != 0
        touched[name].append([_along(hit, dim) for dim in range(hit.dim())])


def _along(hit: Tensor, dim: int) -> Tensor:
    others = [other for other in range(hit.dim()) if other != dim]
    return hit.any(dim=others) if others else hit


def divide(region: Region, touched: Touched) -> Division | None:
    """Each parameter's role; None where the region does not fall apart."""
    splits, slices, summed, shared, inputs, folded = {}, {}, [], [], {}, []
    source_names = {name for site in region.sources for name in site}
    sink_names = {name for site in region.sinks for name in site}
    for name, ranks in touched.items():
        split, disjoint = _pieces(ranks)
        if name.startswith(INPUT):
            index = int(name.removeprefix(INPUT))
            if disjoint and split is not None and len(split.parts) > 1:
                split = split.period()  # of every row, whose number is another each batch
                if split is None:
                    return None
                folded.append(index)
            inputs[index] = split if disjoint else None
        elif split is not None and disjoint:
            splits[name] = split
        elif name in sink_names:
            if len(ranks[0]) > 1:
                return None
            shared.append(name)
        elif split is not None and name in source_names:
            if not all(split.pieces):
                return None  # A rank that needs nothing of a matrix has nothing to compute with it.
            slices[name] = split
        else:
            summed.append(name)
    divided = source_names & {*splits, *slices}
    matrices = [name for name in splits if len(touched[name][0]) > 1]
    if not divided or not matrices:
        return None
    return Division(splits, slices, tuple(summed), tuple(shared), inputs, tuple(folded))


def _pieces(touched: list[list[Tensor]]) -> tuple[TensorSplit | None, bool]:
    """The split along the first dimension where ranks touch different parts; whether the parts are disjoint and
    complete."""
    overlapping = None
    for dim in range(len(touched[0])):
        hits = torch.stack([rank[dim] for rank in touched])
        if not hits.any(dim=0).all() or bool(hits.all()):
            continue
        split = TensorSplit(dim, tuple(_intervals(row) for row in hits))
        if int(hits.sum()) == hits.shape[1] and all(split.pieces):
            return split, True
        overlapping = overlapping or split
    return overlapping, False


def _intervals(row: Tensor) -> tuple[Interval, ...]:
    edges = torch.diff(row.int(), prepend=torch.zeros(1, dtype=torch.int), append=torch.zeros(1, dtype=torch.int))
    starts, stops = torch.nonzero(edges == 1).flatten().tolist(), torch.nonzero(edges == -1).flatten().tolist()
    return tuple(zip(starts, stops, strict=True))
