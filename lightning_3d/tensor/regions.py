"""Regions: products that feed products, so that the first can be split by columns and the last by rows."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from lightning_3d.tensor.trace import Call, Trace, leaves

Site = tuple[str, ...]
"""The parameters of a product: the same ones in every call of it."""


@dataclass(frozen=True)
class Region:
    """What lies between column-split and row-split products."""

    sources: tuple[Site, ...]
    """Products that would be split by columns."""
    sinks: tuple[Site, ...]
    """Products that would be split by rows."""
    inner: tuple[str, ...]
    """Parameters used in between."""
    inputs: tuple[int, ...]
    """Tensor arguments of the block used in between."""


class Flow:
    """Which site feeds which, read from a trace."""

    def __init__(self, trace: Trace, names: dict[int, str]) -> None:
        self.names = names
        self.calls: dict[Site, list[Call]] = {}
        for call in trace.calls:
            self.calls.setdefault(call.parameters, []).append(call)
        self.leaf_site = {id(call.leaf): call.parameters for call in trace.calls}
        self.input_index = {id(tensor): index for index, tensor in enumerate(trace.inputs)}
        self.reached = {site: self._leaves(call.before for call in calls) for site, calls in self.calls.items()}
        self.sources = {site: self._sites(found) for site, found in self.reached.items()}
        self.exits = self._sites(self._leaves(trace.outputs))

    def regions(self) -> list[Region]:
        """Every closed region, in the order in which the products ran."""
        found: dict[tuple[Site, ...], Region] = {}
        for site in self.calls:
            region = self._grow(site)
            if region is not None:
                found.setdefault(region.sinks, region)
        return list(found.values())

    def leaves_block(self, region: Region) -> bool:
        """Whether what the column products give is also among the block's results."""
        return bool(self.exits.keys() & set(region.sources))

    def why_not(self, site: Site) -> str:
        """Why `site` does not end a region."""
        if not self.sources[site]:
            return "no other product feeds it"
        if self.exits.keys() & self.sources[site].keys():
            return "what feeds it is also a result of the block, so it is needed whole"
        return "what feeds it also feeds the products before it"

    def _grow(self, seed: Site) -> Region | None:
        sinks, sources = {seed: None}, dict.fromkeys(self.sources[seed])
        grown = True
        while grown:
            feeds = [s for s, feeding in self.sources.items() if s not in sinks and sources.keys() & feeding.keys()]
            sinks.update(dict.fromkeys(feeds))
            sources.update(dict.fromkeys(source for sink in feeds for source in self.sources[sink]))
            grown = bool(feeds)
        if not sources or sources.keys() & sinks.keys():
            return None
        reached = {id(leaf): leaf for sink in sinks for leaf in self.reached[sink]}
        used = {name for site in (*sources, *sinks) for name in site}
        inner = [name for key in reached if (name := self.names.get(key)) is not None and name not in used]
        inputs = [self.input_index[key] for key in reached if key in self.input_index]
        return Region(tuple(sources), tuple(sinks), tuple(inner), tuple(inputs))

    def _leaves(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return list({id(leaf): leaf for tensor in tensors for leaf in leaves(tensor)}.values())

    def _sites(self, found: list[Tensor]) -> dict[Site, None]:
        return {self.leaf_site[id(leaf)]: None for leaf in found if id(leaf) in self.leaf_site}
