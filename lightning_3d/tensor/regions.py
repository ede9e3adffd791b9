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
    joints: tuple[Site, ...] = ()
    """Products that stay whole and whose result enters the region, also what a column product takes: keys and values
    expanded from a latent that the heads share a part of."""
    joined: tuple[Site, ...] = ()
    """Column products that take what joints give and nothing else."""


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
        joints = dict[Site, None]()
        while True:
            sinks, sources = self._closed(seed, joints)
            both = sources.keys() & sinks.keys()
            feeding = {feeder: None for site in both for feeder in self.sources[site] if site != seed}
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
        """The products that what feeds `seed` feeds too, and everything that feeds them, but for `joints`."""
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
        """Arguments of the block that `site` takes."""
        return [self.input_index[id(leaf)] for leaf in self.reached[site] if id(leaf) in self.input_index]

    def _leaves(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        return list({id(leaf): leaf for tensor in tensors for leaf in leaves(tensor)}.values())

    def _sites(self, found: list[Tensor]) -> dict[Site, None]:
        return {self.leaf_site[id(leaf)]: None for leaf in found if id(leaf) in self.leaf_site}
