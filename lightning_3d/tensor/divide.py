"""Measured division of a region: which elements of each parameter a rank needs.

A rank's share of a row-split product's input is sent backward. Where the gradient is exactly zero, the rank does not
need the element. The gradient shows which rows of a q/k/v matrix the first half of the heads depends on. So fused,
interleaved, grouped or transposed layouts need no names and no guesses.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_3d.tensor.geometry import Interval, TensorSplit
from lightning_3d.tensor.regions import Flow, Region
from lightning_3d.tensor.tensor_plan import UnitPlan

Reached = dict[str, list[list[Tensor]]]
"""For each parameter, rank and dimension: True for the indices that have a gradient."""
INPUT = "argument "
"""Prefix that tells arguments of the block from its parameters."""


def measure(
    flow: Flow,
    region: Region,
    inputs: Sequence[Tensor],
    parameters: Mapping[str, Tensor],
    dim: int,
    unit: int,
    ranks: int,
    generator: torch.Generator,
) -> Reached | None:
    """The elements that each rank needs if dimension `dim` of the sinks' input is divided in multiples of `unit`.

    None where that dimension cannot be divided so.
    """
    own = {name: parameters[name] for sink in region.sinks for name in sink}
    names = dict.fromkeys((*(name for site in region.sources for name in site), *region.inner))
    upstream = {name: parameters[name] for name in names if name not in own}
    upstream |= {f"{INPUT}{index}": inputs[index] for index in region.inputs if inputs[index].requires_grad}
    reached: Reached = {name: [] for name in (*upstream, *own)}
    for rank in range(ranks):
        dealt = _deal(flow, region, dim, unit, rank, ranks)
        if dealt is None:
            return None
        _collect(reached, dealt[0], upstream, generator)
        _collect(reached, dealt[1], own, generator)
    return reached


def merge(ours: Reached, theirs: Reached) -> Reached:
    pairs = {name: zip(ours[name], theirs[name], strict=True) for name in ours}
    return {
        name: [[a | b for a, b in zip(mine, other, strict=True)] for mine, other in pair]
        for name, pair in pairs.items()
    }


def _deal(
    flow: Flow, region: Region, dim: int, unit: int, rank: int, ranks: int
) -> tuple[list[Tensor], list[Tensor]] | None:
    """`rank`'s share of each sink's input, before the product and after it."""
    backward, forward = [], []
    for sink in region.sinks:
        for call in flow.calls.get(sink, ()):  # an expert without a token in this run has no calls
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


def _collect(reached: Reached, probes: list[Tensor], targets: Mapping[str, Tensor], generator: torch.Generator) -> None:
    if not targets:
        return
    if not probes:
        for name, target in targets.items():
            reached[name].append([torch.zeros(size, dtype=torch.bool) for size in target.shape])
        return
    total = torch.stack([(probe * torch.randn(probe.shape, generator=generator)).sum() for probe in probes]).sum()
    grads = torch.autograd.grad(total, list(targets.values()), retain_graph=True, allow_unused=True)
    for (name, target), grad in zip(targets.items(), grads, strict=True):
        hit = torch.zeros(target.shape, dtype=torch.bool) if grad is None else grad != 0
        reached[name].append([_along(hit, dim) for dim in range(hit.dim())])


def _along(hit: Tensor, dim: int) -> Tensor:
    others = [other for other in range(hit.dim()) if other != dim]
    return hit.any(dim=others) if others else hit


def divide(region: Region, reached: Reached) -> UnitPlan | None:
    """The role of each parameter and argument of the block. None where the region cannot be divided."""
    splits, slices, summed, shared, inputs, folded = {}, {}, [], [], {}, []
    source_names = {name for site in region.sources for name in site}
    sink_names = {name for site in region.sinks for name in site}
    for name, ranks in reached.items():
        split, disjoint = _pieces(ranks)
        if name.startswith(INPUT):
            index = int(name.removeprefix(INPUT))
            if disjoint and split is not None and len(split.sections) > 1:
                split = split.period()  # the split of one row, because batches differ in rows
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
                return None  # a rank that needs nothing of a matrix has nothing to compute
            slices[name] = split
        else:
            summed.append(name)
    divided = source_names & {*splits, *slices}
    matrices = [name for name in splits if len(reached[name][0]) > 1]
    if not divided or not matrices:
        return None
    return UnitPlan(
        splits=splits, slices=slices, summed=tuple(summed), shared=tuple(shared), inputs=inputs, folded=tuple(folded)
    )


def _pieces(reached: list[list[Tensor]]) -> tuple[TensorSplit | None, bool]:
    """The split along the first dimension where ranks differ, and True where the shards are disjoint and complete."""
    overlapping = None
    for dim in range(len(reached[0])):
        hits = torch.stack([rank[dim] for rank in reached])
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
