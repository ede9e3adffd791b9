"""Find the plan of one block: trace it, divide its regions, try the attributes, keep what is proven."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lightning_3d.tensor.attributes import combinations, watch_reads
from lightning_3d.tensor.plan import Attribute, UnitPlan
from lightning_3d.tensor.proof import Prover, Refused
from lightning_3d.tensor.regions import Flow, Region, Site
from lightning_3d.tensor.sample import Sample
from lightning_3d.tensor.scratch import names_of
from lightning_3d.tensor.touched import Division, divide, measure, merge
from lightning_3d.tensor.trace import Trace, trace

LOOKS = 4
"""Runs whose gradients are put together: a unit that was off in one is on in another."""


@dataclass
class Study:
    """What is known of a block that is being planned."""

    scratch: nn.Module
    prover: Prover
    ranks: int
    looks: list[tuple[Trace, Flow, Mapping[str, nn.Parameter]]]
    read: Mapping[Attribute, Any]

    @property
    def flow(self) -> Flow:
        return self.looks[0][1]

    @property
    def called(self) -> set[str]:
        """Modules whose forward ran."""
        return self.looks[0][0].called


def study(make: Callable[[int], nn.Module], samples: Sequence[Sample], ranks: int) -> Study:
    """Trace the block in training and in eval mode and note what its code reads.

    Args:
        make: a scratch copy of the block, with random parameters from a seed.
        samples: calls to prove on.
        ranks: tensor ranks.
    """
    looks, scratch = [], make(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for look in range(LOOKS):
            call, twin = samples[0].random(torch.Generator().manual_seed(look)).followed(), make(look + 1).train()
            seen = trace(twin, call)
            looks.append((seen, Flow(seen, dict(names_of(twin))), dict(twin.named_parameters())))
        with watch_reads(scratch) as read:
            trace(scratch.train(), samples[0].fresh())
            trace(scratch.eval(), samples[0].fresh())
    return Study(scratch, Prover(scratch, samples, ranks), ranks, looks, dict(read))


def find_plan(known: Study) -> tuple[UnitPlan | None, dict[str, str]]:
    """The plan of the block, if any region of it can be split, and why what stays whole does."""
    plan, whole, used = UnitPlan(), {}, set[Site]()
    parameters = dict(known.scratch.named_parameters())
    count = lambda sites: sum(parameters[name].numel() for site in sites for name in site)  # noqa: E731
    regions = sorted(known.flow.regions(), key=lambda r: (known.flow.leaves_block(r), -count((*r.sources, *r.sinks))))
    for region in regions:
        sites = {*region.sources, *region.sinks}
        if sites & used:
            continue
        found, reason = _split_region(known, region, plan)
        if found is None:
            whole.update({name: reason for site in sites for name in site if parameters[name].dim() > 1})
        else:
            plan, used = found, used | sites
    for site in known.flow.calls:
        if site not in used:
            for name in site:
                if parameters[name].dim() > 1:
                    whole.setdefault(name, known.flow.why_not(site))
    return (plan if plan.splits else None), {name: why for name, why in whole.items() if name not in plan.splits}


def _split_region(known: Study, region: Region, base: UnitPlan) -> tuple[UnitPlan | None, str]:
    reason = "its parts depend on one another (a norm or a mix over all of them)"
    for division in _divisions(known, region):
        refusals: list[str] = []
        for candidate in _candidates(known, region, division):
            try:
                return known.prover.prove(base.merged(candidate)), ""
            except Refused as refusal:
                refusals.insert(0, str(refusal))
            except Exception as error:  # a wrong candidate breaks the block's own code in any way it likes
                refusals.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        reason = f"{len(refusals)} candidates tried, none computes the same: {refusals[0]}"
    return None, reason


def _divisions(known: Study, region: Region) -> Iterator[Division]:
    """Ways to deal out the region's channels, those without repetition first."""
    repeated, seen = [], []
    for unit in _units(known, region):
        touched = None
        for number, (traced, flow, parameters) in enumerate(known.looks):
            generator = torch.Generator().manual_seed(number)
            look = measure(flow, region, traced.inputs, parameters, unit, known.ranks, generator)
            if look is None:
                break
            touched = look if touched is None else merge(touched, look)
        division = divide(region, touched) if touched is not None else None
        if division is None or division in seen:
            continue
        seen.append(division)
        if division.slices:
            repeated.append(division)
        else:
            yield division
    yield from repeated


def _units(known: Study, region: Region) -> list[int]:
    """Sizes of what must stay together: single channels, then heads of any size that the block's numbers suggest."""
    size = known.flow.calls[region.sinks[0]][0].before.shape[-1]
    numbers = {value for value in known.read.values() if type(value) is int and value > 1 and size % value == 0}
    units = {1} | {unit for number in numbers for unit in (number, size // number)}
    return sorted(unit for unit in units if size // unit >= known.ranks)


def _candidates(known: Study, region: Region, division: Division) -> Iterator[UnitPlan]:
    """Every combination of numbers that might shrink, first as they are read, then with the width of the input too."""
    plain = _candidate(known, region, division)
    near, forced = _near(known, region), _forced(known, region, division)
    for decoys in ({}, _decoys(known, region, division)):
        for must in [forced, {}] if forced else [{}]:
            for attributes in combinations(near, division.fractions, must):
                yield replace(plain, attributes=attributes, decoys=decoys)
        if not _decoys(known, region, division):
            return


def _decoys(known: Study, region: Region, division: Division) -> dict[str, tuple[int, ...]]:
    """The module around the region sees its input as wide as the shard of the row product's input."""
    module = _around(known, region)
    width = known.flow.calls[region.sinks[0]][0].before.shape[-1]
    feeding = known.flow.calls[region.sources[0]][0].before.shape[-1]
    split = division.splits[region.sinks[0][0]]
    if width != feeding or module in (known.flow.calls[site][0].module for site in region.sources):
        return {}
    return {module: tuple(split.local_size(rank) for rank in range(split.ranks))}


def _candidate(known: Study, region: Region, division: Division) -> UnitPlan:
    flow, called = known.flow, known.called
    module_of = lambda site: flow.calls[site][0].module  # noqa: E731
    names = dict.fromkeys((*division.splits, *division.slices, *division.summed, *division.shared))
    holders = {name: _holder(name, called) for name in names}
    holders |= {name: module_of(site) for site in (*region.sources, *region.sinks) for name in site}
    return UnitPlan(
        splits=division.splits,
        slices=division.slices,
        summed=division.summed,
        shared=division.shared,
        copies=tuple(dict.fromkeys(map(module_of, region.sources))),
        reduces=tuple(dict.fromkeys(map(module_of, region.sinks))),
        holders=tuple(holders.items()),
        inputs=division.inputs,
    )


def _holder(name: str, called: set[str]) -> str:
    """The innermost module around a parameter whose forward ran."""
    while name:
        name = name.rpartition(".")[0]
        if name in called:
            return name
    return ""


def _near(known: Study, region: Region) -> dict[Attribute, Any]:
    """The numbers read by the smallest module around the region and what is in it."""
    prefix = _around(known, region)
    inside = lambda name: not prefix or name == prefix or name.startswith(prefix + ".")  # noqa: E731
    return {key: value for key, value in known.read.items() if inside(key[0])}


def _around(known: Study, region: Region) -> str:
    """The smallest module that ran and holds the whole region."""
    names = [name for site in (*region.sources, *region.sinks) for name in site]
    common = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return _holder(".".join((*common, "parameter")), known.called)


def _forced(known: Study, region: Region, division: Division) -> dict[Attribute, Any]:
    """Numbers of a column product's own module that say how wide it is."""
    found: dict[Attribute, Any] = {}
    for site in region.sources:
        split = division.splits.get(site[0])
        module = known.flow.calls[site][0].module
        for (name, path), value in known.read.items():
            if split is not None and name == module and value == split.size and not _has_children(known.scratch, name):
                found[name, path] = tuple(split.local_size(rank) for rank in range(split.ranks))
    return found


def _has_children(module: nn.Module, name: str) -> bool:
    return any(True for _ in module.get_submodule(name).children())
