"""Regions of a block: products that feed products, so that the first is split by columns and the last by rows.

They are found by one run that is cut at its matrix products. Each product of an activation with a parameter (a "site")
gets its activation as a new leaf of autograd. Autograd then reaches from a site's input only what was computed since
the products before it. So the graph shows which products feed which, and what else takes part (norms, position tables,
arguments of the block), whatever the modules are called.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_3d.module.graph_private import graph_leaves
from lightning_3d.sandbox.interceptor import Call, Interceptor, Rule
from lightning_3d.sandbox.silence import SilenceRandom
from lightning_3d.sandbox.trees import map_leaves, tensors_in
from lightning_3d.tensor.sample import Sample
from lightning_3d.tensor.scratch import names_of

PRODUCTS: frozenset[Any] = frozenset({
    F.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.addbmm, torch.baddbmm, torch.einsum, torch.mv,
    torch.bilinear,
    Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm, Tensor.addmm, Tensor.baddbmm,
    *(getattr(space, name) for space in (torch, F) for name in ("_grouped_mm", "grouped_mm") if hasattr(space, name)),
})  # fmt: skip
Site = tuple[str, ...]
"""The parameters of a product, which are the same in every call of it."""


@dataclass
class TracedCall:
    parameters: Site
    """Its parameters, matrices first."""
    module: str
    """The module whose forward was running."""
    before: Tensor
    """The activation, with the graph that computed it."""
    leaf: Tensor
    """The activation as the product took it: a leaf."""
    again: Callable[[Tensor], Tensor]
    """The product of another activation."""
    beside: tuple[Tensor, ...] = ()
    """Smaller activations that the product takes too: the scores of a soft router."""


@dataclass
class BlockTrace:
    """Record of one run of a block."""

    calls: list[TracedCall] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    results: dict[str, list[Tensor]] = field(default_factory=dict)
    """Tensors that each module returned."""
    called: set[str] = field(default_factory=set)
    """Modules whose forward ran."""


def trace_block(module: nn.Module, sample: Sample) -> BlockTrace:
    """Run `module`, a scratch copy, once, with a new leaf in front of each product."""
    cutter = _Cutter(dict(names_of(module)))
    handles = []
    for name, child in module.named_modules():
        handles.append(child.register_forward_pre_hook(lambda *_, n=name: cutter.enter(n)))
        handles.append(child.register_forward_hook(lambda _, __, out, n=name: cutter.leave(out, n), always_call=True))
    try:
        with torch.enable_grad(), Interceptor(SilenceRandom(), cutter):
            cutter.trace.inputs = sample.tensors()
            cutter.trace.outputs = tensors_in(module(*sample.args, **sample.kwargs))
    finally:
        for handle in handles:
            handle.remove()
    return cutter.trace


class _Cutter(Rule):
    def __init__(self, names: dict[int, str]) -> None:
        self.names, self.trace, self.stack = names, BlockTrace(), [""]

    def enter(self, name: str) -> None:
        self.stack.append(name)
        self.trace.called.add(name)

    def leave(self, result: Any, name: str) -> None:
        self.stack.pop()
        self.trace.results.setdefault(name, []).extend(tensors_in(result))

    def before(self, call: Call) -> Call:
        func, args, kwargs = call.func, call.args, call.kwargs
        if func not in PRODUCTS:
            return call
        operands = [x for x in tensors_in((args, kwargs)) if x.is_floating_point()]
        weights = [x for x in operands if self._parameters_of(x)]
        others = [x for x in operands if not self._parameters_of(x) and x.dim() > 1]
        fits = len(others) == 1 or (func is torch.einsum and len(set(map(id, others))) == len(others) > 1)
        if not fits or not any(weight.dim() > 1 for weight in weights):
            return call
        before, *beside = sorted(others, key=Tensor.numel, reverse=True)
        leaf = before.detach().clone().requires_grad_()

        def again(value: Tensor) -> Tensor:
            swap = lambda x: value if x is before else x  # noqa: E731
            return func(*map_leaves(swap, args), **map_leaves(swap, kwargs))

        matrices = [name for w in weights if w.dim() > 1 for name in self._parameters_of(w)]
        vectors = [name for w in weights if w.dim() == 1 for name in self._parameters_of(w)]
        self.trace.calls.append(TracedCall((*matrices, *vectors), self.stack[-1], before, leaf, again, tuple(beside)))
        return call._replace(func=again, args=(leaf,), kwargs={})

    def _parameters_of(self, tensor: Tensor) -> list[str]:
        """Names of the parameters that `tensor` is computed from. Empty where anything else takes part."""
        found = graph_leaves(tensor)
        return [self.names[id(leaf)] for leaf in found] if all(id(leaf) in self.names for leaf in found) else []


@dataclass(frozen=True)
class Region:
    """Column-split products, row-split products that they feed, and what is in between."""

    sources: tuple[Site, ...]
    """Products that would be split by columns."""
    sinks: tuple[Site, ...]
    """Products that would be split by rows."""
    inner: tuple[str, ...]
    """Parameters used in between."""
    inputs: tuple[int, ...]
    """Tensor arguments of the block used in between."""
    joints: tuple[Site, ...] = ()
    """Products whose results are full and feed the region and one of its column products.

    Most stay unsplit: keys and values expanded from a latent, of which the heads share a part, are an example. One that
    is a sink too is split by rows and summed within the region. In a state space these are the step size, B and C: they
    are computed from all channels, and all channels use them.
    """
    joined: tuple[Site, ...] = ()
    """Column products that only joints feed."""

    @property
    def sites(self) -> tuple[Site, ...]:
        return *self.sources, *self.sinks

    @property
    def names(self) -> list[str]:
        return [name for site in self.sites for name in site]


class Flow:
    """A map of which site feeds which, read from a trace."""

    def __init__(self, trace: BlockTrace, names: dict[int, str]) -> None:
        self.names = names
        self.calls: dict[Site, list[TracedCall]] = {}
        for call in trace.calls:
            self.calls.setdefault(call.parameters, []).append(call)
        self.leaf_site = {id(call.leaf): call.parameters for call in trace.calls}
        self.input_index = {id(tensor): index for index, tensor in enumerate(trace.inputs)}
        self.reached = {
            site: self._leaves(tensor for call in calls for tensor in (call.before, *call.beside))
            for site, calls in self.calls.items()
        }
        self.sources = {site: self._sites(found) for site, found in self.reached.items()}
        self.exits = self._sites(self._leaves(trace.outputs))

    def regions(self) -> list[Region]:
        """Every closed region, in the order in which the products ran."""
        found: dict[tuple[frozenset[Site], ...], Region] = {}
        for site in self.calls:
            for split_joints in (True, False):
                region = self._grow(site, split_joints)
                if region is not None:
                    found.setdefault((frozenset(region.sinks), frozenset(region.joints)), region)
        return list(found.values())

    def leaves_block(self, region: Region) -> bool:
        """Return True if the result of a column product is also a result of the block."""
        return bool(self.exits.keys() & set(region.sources))

    def why_not(self, site: Site) -> str:
        """The reason for which `site` does not end a region."""
        if not self.sources[site]:
            return "no other product feeds it"
        if self.exits.keys() & self.sources[site].keys():
            return "the product that feeds it is also a result of the block, which must be complete"
        return "the product that feeds it also feeds the products before it"

    def _grow(self, seed: Site, split_joints: bool) -> Region | None:
        """The region that ends with `seed`. With `split_joints`, only products that are sinks become joints."""
        joints = dict[Site, None]()
        while True:
            sinks, sources = self._closed(seed, joints)
            both = sources.keys() & sinks.keys()
            feeding = {feeder: None for site in both for feeder in self.sources[site] if site != seed}
            if split_joints:
                feeding = {site: None for site in feeding if site in both}
            if not both or not feeding or joints.keys() >= feeding.keys() or seed in both:
                break
            joints |= feeding
        joined = [site for site in sources if self.sources[site].keys() & joints.keys()]
        mixed = any(self.sources[site].keys() - joints.keys() or self._arguments(site) for site in joined)
        if not sources or both or mixed:
            return None
        reached = {id(leaf): leaf for site in (*sinks, *joined) for leaf in self.reached[site]}
        used = {name for site in (*sources, *sinks, *joints) for name in site}
        inner = [name for key in reached if (name := self.names.get(key)) is not None and name not in used]
        inputs = [self.input_index[key] for key in reached if key in self.input_index]
        return Region(tuple(sources), tuple(sinks), tuple(inner), tuple(inputs), tuple(joints), tuple(joined))

    def _closed(self, seed: Site, joints: dict[Site, None]) -> tuple[dict[Site, None], dict[Site, None]]:
        """Two sets without `joints`: all products fed by a source of `seed`, and all that feed those."""
        feeding = {site: [s for s in found if s not in joints] for site, found in self.sources.items()}
        sinks, sources = {seed: None}, dict.fromkeys(feeding[seed])
        grown = True
        while grown:
            feeds = [site for site, found in feeding.items() if site not in sinks and sources.keys() & set(found)]
            sinks.update(dict.fromkeys(feeds))
            sources.update(dict.fromkeys(source for sink in feeds for source in feeding[sink]))
            grown = bool(feeds)
        return sinks, sources

    def _arguments(self, site: Site) -> list[int]:
        """Indices of the block's arguments that `site` takes."""
        return [self.input_index[id(leaf)] for leaf in self.reached[site] if id(leaf) in self.input_index]

    def _leaves(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return list({id(leaf): leaf for tensor in tensors for leaf in graph_leaves(tensor)}.values())

    def _sites(self, found: list[Tensor]) -> dict[Site, None]:
        return {self.leaf_site[id(leaf)]: None for leaf in found if id(leaf) in self.leaf_site}
