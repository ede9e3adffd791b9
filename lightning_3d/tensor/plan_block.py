"""The plan of one block: trace it, divide its regions, try the attributes, keep what is proven.

A norm over all channels of a split region (over the queries of every head, for example) is a mixer. Its result depends
on every channel, so no gradient shows a division. To find one, the norm is replaced by its weight alone, which acts on
each channel by itself. The resulting candidate gathers the channels, runs the true norm unsplit and takes its shard.
The proof shows if that computes the same.
"""

import copy
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d.module.forward import ForwardLayer, Layer, add_layer
from lightning_3d.module.graph_private import graph_leaves
from lightning_3d.module.undo import UndoStack
from lightning_3d.sandbox.trees import tensors_in
from lightning_3d.tensor.blocks import plan_idle_experts, structure
from lightning_3d.tensor.divide import divide, measure, merge
from lightning_3d.tensor.proof import Prover, Refused
from lightning_3d.tensor.regions import BlockTrace, Flow, Region, trace_block
from lightning_3d.tensor.sample import Sample
from lightning_3d.tensor.scratch import names_of
from lightning_3d.tensor.sequence import sequence_candidates
from lightning_3d.tensor.sizes import combinations, watch_reads
from lightning_3d.tensor.tensor_plan import Attribute, UnitPlan
from lightning_3d.tensor.whole_experts import kept_aside, plan_experts
from lightning_3d.tensor.written_plan import WrittenSplit, divide_as_written, innermost

RUNS, MOST_RUNS = 4, 16
"""Runs whose gradients are merged: a ReLU that was off in one run is on in another. More while some were never on."""


@dataclass(frozen=True)
class TracedRun:
    trace: BlockTrace
    flow: Flow
    parameters: Mapping[str, nn.Parameter]


class Study:
    """The facts about a block that is being planned.

    `make` returns a scratch copy of the block, with random parameters from a seed. `original` has its author's code.
    """

    def __init__(
        self, make: Callable[[int], nn.Module], original: nn.Module, samples: Sequence[Sample], ranks: int
    ) -> None:
        self.make, self.samples, self.ranks = make, samples, ranks
        self.runs: list[TracedRun] = []
        self.mixers: tuple[str, ...] = ()
        """Norms that are replaced by their weights in the runs."""
        self.scratch, watched = make(0), make(0)  # a run changes the statistics of a batch norm
        with warnings.catch_warnings(), watch_reads(watched) as read:
            warnings.simplefilter("ignore")
            trace_block(watched.train(), samples[0].fresh())
            trace_block(watched.eval(), samples[0].fresh())
        self.read: Mapping[Attribute, Any] = dict(read)
        """Plain values that the block's code reads in training or eval mode."""
        self.prover = Prover(self.scratch, original, samples, ranks)
        self.modules: Mapping[str, nn.Module] = dict(self.scratch.named_modules())
        first = self.run(0)
        self.flow, self.parameters, self.called = first.flow, first.parameters, first.trace.called

    def run(self, number: int) -> TracedRun:
        while len(self.runs) <= number:
            seed = len(self.runs)
            call = self.samples[0].random(torch.Generator().manual_seed(seed)).followed()
            twin = self.make(seed + 1).train()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trace = trace_block(twin, call)
            self.runs.append(TracedRun(trace, Flow(trace, dict(names_of(twin))), dict(twin.named_parameters())))
        return self.runs[number]


def find_plan(known: Study, ways: Mapping[str, WrittenSplit], *, must: bool) -> tuple[UnitPlan | None, dict[str, str]]:
    """The plan of the block, None where no region can be split, and the reasons why parameters stay unsplit.

    Where written `ways` do not compute the same, others are tried, or if they `must` be kept, `Refused` is raised.
    """
    plan, unsplit = plan_experts(known.prover, known.called, known.read, ways, must=must), dict[str, str]()
    used, failed = {s for s in known.flow.calls if plan.splits.keys() & s}, dict[tuple[object, ...] | None, str]()
    parameters = dict(known.scratch.named_parameters())
    regions = _regions(known, ways, parameters)
    kinds = {region: _kind(known, region) for region in regions if not any(name in ways for name in region.names)}
    if regions:
        known.prover.run_unsplit()
    for region in regions:
        if used.intersection(region.sites):
            continue
        if any(ways[name].kind == "whole" for name in region.names if name in ways):
            found, reason = None, "the tensor plan says so"
        elif any(c.beside for s in region.sinks for c in known.flow.calls[s]) and (kept := kept_aside(known.prover)):
            found, reason = None, kept
        elif (kind := kinds.get(region)) in failed:
            found, reason = None, failed[kind]
        else:
            ours = {} if region in kinds else ways
            others = [each for each, own in kinds.items() if own == kind and each != region]
            alike = [each for each in others if not used.intersection(each.sites)]
            found, reason = _split_region(known, region, alike, plan, ours, must)
            if found is None and alike:
                alike = []
                found, reason = _split_region(known, region, alike, plan, ours, must)
            if found is None and kind is not None:
                failed[kind] = reason
        if found is None:
            unsplit.update({name: reason for name in region.names if parameters[name].dim() > 1})
            continue
        plan, used = found, used.union(region.sites, *(each.sites for each in alike))
    for site in known.flow.calls:
        for name in site:
            if site not in used and parameters[name].dim() > 1:
                unsplit.setdefault(name, known.flow.why_not(site))
    if not known.flow.calls:
        unsplit[""] = "it has no product of an activation with a matrix"
    plan = plan_idle_experts(plan, known.scratch, known.called)
    return (plan if plan.splits else None), {name: why for name, why in unsplit.items() if name not in plan.splits}


def with_sequence(known: Study, plan: UnitPlan) -> UnitPlan | None:
    """`plan` with the residual stream divided too. None where no such candidate is proven."""
    call = known.prover.cases[0]
    trainable = [name for name, parameter in known.parameters.items() if parameter.requires_grad]
    for candidate in sequence_candidates(plan, call[1].tensors(), call[2].outputs, trainable, known.prover.ranks):
        try:
            return known.prover.prove(candidate)
        except Exception:  # a wrong candidate makes the block's code fail in any way
            continue
    return None


def _regions(known: Study, ways: Mapping[str, WrittenSplit], parameters: Mapping[str, nn.Parameter]) -> list[Region]:
    """Regions to try: those of a written plan, then the largest. Those that feed a result of the block are last."""
    count = lambda region: sum(parameters[name].numel() for name in region.names)  # noqa: E731
    asked = lambda region: any(name in ways for name in region.names)  # noqa: E731
    found = sorted(known.flow.regions(), key=lambda r: (not asked(r), known.flow.leaves_block(r), -count(r)))
    inside = {site for region in found for site in region.sites}
    for site in known.flow.calls:
        way = next((ways[name] for name in site if name in ways), None)
        if site not in inside and way is not None and way.kind != "whole":
            column = way.kind == "column"
            found.insert(0, Region((site,) if column else (), () if column else (site,), (), ()))
    return found


def _split_region(
    known: Study, region: Region, alike: Sequence[Region], base: UnitPlan, ways: Mapping[str, WrittenSplit], must: bool
) -> tuple[UnitPlan | None, str]:
    """`base` with `region` and those `alike` split in one way, by one proof. None and a reason where none passes."""
    reason = "its channels depend on one another (a norm or a mix over all of them)"
    written = divide_as_written(region, known.parameters, ways, known.modules, known.ranks) if ways else None
    inferred = () if must and written else _divisions(known, region)
    for division in chain([written] if written else [], inferred):
        refusals, broken = list[str](), list[str]()
        for candidate in _candidates(known, region, division):
            try:
                return known.prover.prove(base.merged(_repeated(known, candidate, region, alike))), ""
            except Refused as refusal:
                refusals.insert(0, str(refusal))
            except Exception as error:  # a wrong candidate makes the block's code fail in any way
                first = str(error).splitlines()[0] if str(error) else ""
                broken.append(f"it does not run ({type(error).__name__}: {first})")
        tried = len(refusals) + len(broken)
        if must and division is written and not refusals:
            refusals = known.prover.difference(base.merged(_candidate(known, region, division)))
        reason = f"{tried} candidates tried, none computes the same: {(refusals or broken)[0]}"
    if must and written:
        raise Refused(reason)
    mixers = find_mixers(known, region) if region.sinks and not known.mixers else []
    if mixers:
        with suppress(Exception):  # code may fail in any way on what stands for a norm, as where it expects a tuple
            return _split_region(without_mixing(known, mixers), region, alike, base, {}, must)[0], reason
    return None, reason


def _repeated(known: Study, plan: UnitPlan, region: Region, alike: Sequence[Region]) -> UnitPlan:
    """The plan of `region` for those `alike` too: experts, or attention layers of a UNet."""
    prefix, places = _around(known, region), [_around(known, other) for other in alike]
    repeated = reduce(UnitPlan.merged, (plan.renamed(prefix, place) for place in places), plan)
    every = [
        [at + name.removeprefix(prefix) for at in (prefix, *places) for name in begins] for begins in plan.edges[0]
    ]
    return replace(repeated, edges=(tuple(map(tuple, every)),))


def _divisions(known: Study, region: Region) -> Iterator[UnitPlan]:
    """Divisions of the region's channels: those without overlapping slices first, then those that divide most."""
    if not region.sinks:
        return  # half of a region, which only a written plan names
    later: list[UnitPlan] = []
    sinks = [call.before for sink in region.sinks for call in known.flow.calls[sink]]
    bare = any(known.parameters[name].dim() > 2 for sink in region.sinks for name in sink)
    for dim in range(-1, -min(tensor.dim() for tensor in sinks) - 1, -1) if bare else (-1,):
        for unit in _units(known, sinks[0].shape[dim]):
            division = _division(known, region, dim, unit)
            if division is None or division in later:
                continue
            if not bare and not division.slices:
                yield division
            later.append(division)
    numel = {name: parameter.numel() for name, parameter in known.parameters.items()}
    done = [] if bare else [division for division in later if not division.slices]
    yield from sorted(
        (division for division in later if division not in done),
        key=lambda division: (bool(division.slices), -sum(numel[name] for name in division.splits)),
    )


def _division(known: Study, region: Region, dim: int, unit: int) -> UnitPlan | None:
    """Merge more runs while some units were off, until every element of a matrix is some rank's."""
    reached, division, whole = None, None, False
    columns = {name for site in region.sources for name in site}
    for number in range(MOST_RUNS):
        if number >= RUNS and whole:
            break
        run = known.run(number)
        generator = torch.Generator().manual_seed(number)
        found = measure(
            run.flow, region, run.trace.inputs, run.parameters, dim=dim, unit=unit, ranks=known.ranks,
            generator=generator
        )  # fmt: skip
        if found is None:
            return None
        reached = found if reached is None else merge(reached, found)
        whole = all(torch.stack(hits).any(0).all() for ranks in reached.values() for hits in zip(*ranks, strict=True))
        division = divide(region, reached)
        if division is not None and not division.slices and not columns & set(division.summed):
            return division
    return division


def _units(known: Study, size: int) -> list[int]:
    """Sizes of groups that stay together: single channels, then heads of sizes that the block's numbers suggest."""
    numbers = {value for value in known.read.values() if type(value) is int and value > 1 and size % value == 0}
    units = {1} | {unit for number in numbers for unit in (number, size // number)}
    return sorted(unit for unit in units if size // unit >= known.ranks)


def _candidates(known: Study, region: Region, division: UnitPlan) -> Iterator[UnitPlan]:
    """Combinations of numbers that may shrink, first without decoys (false widths of inputs) and then with them."""
    near, forced = _near(known, region), _forced(known, region, division)
    for plain in _with_tail(known, _candidate(known, region, division)):
        for decoys in ({}, _decoys(known, region, division)):
            for must in [forced, {}] if forced else [{}]:
                for attributes in combinations(near, division.fractions, must):
                    yield replace(plain, attributes=attributes, decoys=decoys)
            if not _decoys(known, region, division):
                break


def _with_tail(known: Study, plain: UnitPlan) -> Iterator[UnitPlan]:
    """Plans in which parameters that follow a row product are shared or summed, then `plain`."""
    inside = {*plain.splits, *plain.slices, *plain.summed, *plain.shared}
    results = [
        (f"{module}." if module else "", t) for module in plain.reduces for t in known.runs[0].trace.results[module]
    ]
    used = {(at, known.flow.names.get(id(leaf), "")) for at, t in results for leaf in graph_leaves(t)}
    tail = tuple(sorted({name for at, name in used if name and name.startswith(at)} - inside))
    holders = (*plain.holders, *((name, innermost(name, known.called)) for name in tail))
    if tail:
        yield replace(plain, shared=(*plain.shared, *tail), holders=holders)
        yield replace(plain, summed=(*plain.summed, *tail), holders=holders)
    yield plain


def _decoys(known: Study, region: Region, division: UnitPlan) -> dict[str, tuple[int, ...]]:
    """Decoys for the module around the region: its input as wide as the shard of the row product's input."""
    if not region.sinks or not region.sources:
        return {}
    module = _around(known, region)
    width = known.flow.calls[region.sinks[0]][0].before.shape[-1]
    feeding = known.flow.calls[region.sources[0]][0].before.shape[-1]
    split = division.splits.get(region.sinks[0][0])
    if split is None or width != feeding or module in (known.flow.calls[site][0].module for site in region.sources):
        return {}
    return {module: tuple(split.local_size(rank) for rank in range(split.ranks))}


def _candidate(known: Study, region: Region, division: UnitPlan) -> UnitPlan:
    flow, called = known.flow, known.called
    module_of = lambda site: flow.calls[site][0].module  # noqa: E731
    names = dict.fromkeys((*division.splits, *division.slices, *division.summed, *division.shared))
    holders = {name: innermost(name, called) for name in names}
    holders |= {name: module_of(site) for site in (*region.sources, *region.sinks) for name in site}
    sources = tuple(dict.fromkeys(module_of(site) for site in region.sources if site not in region.joined))
    around = [(_around(known, region),), (_around(known, replace(region, sinks=())),), sources]
    plan = replace(
        division,
        edges=(tuple(dict.fromkeys(modules for modules in around if modules != ("",))),),
        copies=sources,
        emits=tuple(dict.fromkeys(map(module_of, region.joints))),
        reduces=tuple(dict.fromkeys(map(module_of, region.sinks))),
        holders=tuple(holders.items()),
    )
    return gather_around(plan, known.mixers) if known.mixers else plan


def _near(known: Study, region: Region) -> dict[Attribute, Any]:
    """The numbers read by the smallest module around the region, and by modules inside it."""
    prefix = _around(known, region)
    inside = lambda name: not prefix or name == prefix or name.startswith(prefix + ".")  # noqa: E731
    return {key: value for key, value in known.read.items() if inside(key[0])}


def _around(known: Study, region: Region) -> str:
    """The smallest module that ran and contains the region."""
    common = []
    for steps in zip(*(name.split(".")[:-1] for name in region.names), strict=False):
        if len(set(steps)) > 1:
            break
        common.append(steps[0])
    return innermost(".".join(common), known.called)


def _forced(known: Study, region: Region, division: UnitPlan) -> dict[Attribute, Any]:
    """Numbers of a column product's own module that are its width, such as `out_features`."""
    found: dict[Attribute, Any] = {}
    for site in region.sources:
        split = division.splits.get(site[0])
        module = known.flow.calls[site][0].module
        for (name, path), value in known.read.items():
            if split is None or name != module or value != split.size:
                continue
            if not list(known.scratch.get_submodule(name).children()):
                found[name, path] = tuple(split.local_size(rank) for rank in range(split.ranks))
    return found


def _kind(known: Study, region: Region) -> tuple[object, ...]:
    """A key that is equal for regions of the same modules: layers in one block that repeat."""
    prefix = _around(known, region)
    inside = lambda sites: tuple(tuple(name.removeprefix(prefix) for name in site) for site in sites)  # noqa: E731
    near = ((name.removeprefix(prefix), path, value) for (name, path), value in _near(known, region).items())
    numbers = repr([item for item in near if type(item[2]) is not str])  # some are lists
    return inside(region.sources), inside(region.sinks), numbers, structure(known.modules[prefix])


def find_mixers(known: "Study", region: Region) -> list[str]:
    """Modules in `region` whose parameters are vectors as wide as a column product: they may mix its channels."""
    results = known.runs[0].trace.results
    widths = {t.shape[-1] for site in region.sources for t in results[known.flow.calls[site][0].module]}
    owners = dict.fromkeys(name.rpartition(".")[0] for name in region.inner)
    return [name for name in owners if name in known.called and _is_norm(known.modules[name], widths)]


def without_mixing(known: "Study", mixers: Collection[str]) -> "Study":
    """Facts about the block with `mixers` replaced by their weights, which act on each channel alone."""
    twin = copy.copy(known)
    make = known.make
    twin.make, twin.runs, twin.mixers = lambda seed: _act_alone(make(seed), mixers), [], tuple(mixers)
    first = twin.run(0)
    twin.flow, twin.parameters = first.flow, first.parameters
    return twin


def gather_around(plan: UnitPlan, mixers: Collection[str]) -> UnitPlan:
    """`plan` with `mixers`, which are split in it, computed unsplit on gathered channels instead."""
    mixes = {
        name: next(split for parameter, split in plan.splits.items() if parameter.rpartition(".")[0] == name)
        for name in mixers
        if any(parameter.rpartition(".")[0] == name for parameter in plan.splits)
    }
    own = [parameter for parameter in plan.splits if parameter.rpartition(".")[0] in mixes]
    splits = {parameter: split for parameter, split in plan.splits.items() if parameter not in own}
    return replace(plan, splits=splits, summed=(*plan.summed, *own), mixes=mixes)


def _is_norm(module: nn.Module, widths: Collection[int]) -> bool:
    vectors = list(module.parameters())
    return bool(vectors) and all(vector.dim() == 1 and vector.numel() in widths for vector in vectors)


def _act_alone(twin: nn.Module, mixers: Collection[str]) -> nn.Module:
    for name in mixers:
        add_layer(_Scaling(twin.get_submodule(name)), UndoStack())
    return twin


class _Scaling(ForwardLayer, rank=Layer.OWN):
    """A norm that only multiplies by its weight, and a gate that it gets, for runs of a scratch copy."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        tensor, *gates = tensors_in((args, kwargs))
        for factor in (*gates, *self.module.parameters()):
            tensor = tensor * factor if tensor.shape[-1:] == factor.shape[-1:] else tensor
        return tensor
