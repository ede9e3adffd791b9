"""The position of a map-style dataloader in an epoch, and how to resume from it.

A position counts samples that the sampler gave to training, not those read from the dataset: workers read ahead. It is
the number of samples that all data ranks have used together. Another number of data ranks therefore gets the rest of
the same order. A sampler of the user runs again from its initial random state.
"""

import copy
from array import array
from collections.abc import Iterator
from itertools import cycle, islice
from typing import Any

import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from lightning_3d.launch.lightning_private import Stateful
from lightning_3d.ranks.random_streams import Streams, main_streams, set_streams

# The order of the samples of an epoch, described by plain values, and drawn again from them.
#
# With several data ranks Lightning replaces the user's sampler by its own. With one data rank the user's stays, and
# samples come as on one device. A run that resumes inside an epoch with another number of data ranks ends that epoch in
# its first order. Once a run has had several data ranks, it keeps their order.

Order = dict[str, Any]
"""The source of an order besides random streams: its `kind` and, if shared, `seed` and `shuffle`."""


def is_shared(sampler: object) -> bool:
    """Return True if the data ranks share one order, of which each takes its share."""
    return type(sampler) in (DistributedSampler, DistributedSamplerWrapper)


def order_of(sampler: Any) -> Order:
    """The order of the epoch that `sampler` gives now."""
    if is_shared(sampler):
        return {"kind": "shared", "seed": sampler.seed, "shuffle": sampler.shuffle}
    if type(sampler) is SequentialSampler:
        return {"kind": "sequential"}
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return {"kind": "random"}
    return {"kind": "own"}


def can_draw(sampler: object, order: Order) -> bool:
    """Return True if `full_order` can draw `order`, begun under another number of data ranks, with this sampler."""
    kinds = {"shared": (DistributedSampler, DistributedSamplerWrapper), "own": (DistributedSamplerWrapper,)}
    return type(sampler) in kinds.get(order["kind"], (DistributedSampler,))


def full_order(sampler: Any, order: Order, generator: torch.Generator | None) -> list[Any]:
    """All samples of the epoch in order. Draws from the main streams or `generator`, which must be as they were."""
    if order["kind"] == "own":
        return list(sampler.dataset._sampler)
    if order["kind"] != "shared":
        data = sampler.dataset
        return list(RandomSampler(data, generator=generator) if order["kind"] == "random" else SequentialSampler(data))
    alone = copy.copy(sampler)
    alone.num_replicas, alone.rank = 1, 0
    alone.num_samples = alone.total_size = len(sampler.dataset)
    return list(alone)


Place = dict[str, Any]
"""A position as plain values, to be saved: see `Counted.place`."""


def counted(loader: object) -> object:
    """`loader`, or where it has a sampler a copy of it whose position can be read and set."""
    if not isinstance(loader, DataLoader) or isinstance(loader, Stateful):
        return loader
    if isinstance(loader.dataset, IterableDataset):
        return loader
    loader = copy.copy(loader)  # the user's own stays as it is
    loader._iterator = None
    name = "batch_sampler" if loader.batch_sampler is not None else "sampler"
    # a DataLoader refuses a new sampler; this one gives the same samples
    counter = Counted(getattr(loader, name), name == "batch_sampler")
    object.__setattr__(loader, name, counter)
    return loader


def counter_of(loader: object) -> "Counted | None":
    """Return the counter of the batches of a loader that `counted` returned."""
    for name in ("batch_sampler", "sampler"):
        if type(found := getattr(loader, name, None)) is Counted:
            return found
    return None


class Counted(Sampler[Any]):
    """A batch sampler (or, for a loader that does not batch, a sampler) that counts what it has given."""

    def __init__(self, inner: Any, batched: bool) -> None:
        self.inner, self.batched = inner, batched
        self.sampler: Any = getattr(inner, "sampler", None) if batched else inner
        self._next: tuple[Place | None, int] = (None, 0)
        self._skipped = self._samples = 0
        self._ends = array("q")
        """Number of samples of this data rank after each batch of the epoch that was not skipped."""
        self._streams: list[Streams] = []
        self._order: Order = {"kind": "own"}
        """The order of the epoch under way; another sampler than this one's may have begun it."""
        self.follows = True
        """True where the epoch resumes with exactly the samples that were not used yet."""

    @property  # type: ignore[misc, override]
    def __class__(self) -> type:
        return type(self.inner)  # what asks for the user's own kind of sampler finds it

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "inner" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __reduce__(self) -> Any:
        return Counted, (self.inner, self.batched), self.__dict__  # pickle's own way refuses one of another class

    def __len__(self) -> int:
        return len(self.inner)

    @property
    def _drawn(self) -> bool:
        """True where the order is drawn from a random stream. That of a DistributedSampler depends on its seed only."""
        return type(self.sampler) is not DistributedSampler

    @property
    def _generator(self) -> torch.Generator | None:
        found = getattr(self.sampler, "generator", None)
        return found if isinstance(found, torch.Generator) else None

    # ---- where it is ---------------------------------------------------------------------------------------------

    def place(self, batches: int) -> Place:
        """The position after `batches` of this epoch."""
        place: Place = {"batches": batches, "length": len(self), "order": self._order, "samples": self._had(batches)}
        if self._streams:
            place |= {"streams": self._streams, "now": main_streams(self._generator)}
        return place

    def _had(self, batches: int) -> int:
        """Number of samples of the order that all its ranks together have used after `batches` of this epoch."""
        index = min(batches - self._skipped, len(self._ends))
        here = self._ends[index - 1] if index > 0 else 0
        return self._samples + int(here) * self._ranks

    @property
    def _ranks(self) -> int:
        return int(self.sampler.num_replicas) if is_shared(self.sampler) else 1

    # ---- going on ------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Start the loader again; samples given so far do not count."""
        self._ends = array("q")

    def go_on_from(self, place: Place | None, batches: int, same_data_ranks: bool) -> int:
        """Let the next iteration resume from `place`, or skip `batches` where there is none.

        Returns the number of skipped batches, in new ones: another number of data ranks divides the epoch into others.
        The sampler must know its epoch.
        """
        length = len(self)
        place = place or {"batches": batches, "length": length}
        if is_shared(self.sampler) and "order" in place:
            for name in ("seed", "shuffle"):
                setattr(self.sampler, name, place["order"].get(name, getattr(self.sampler, name)))
        deals_rest = self._deals_rest_of(place)
        self.follows = same_data_ranks or deals_rest
        if deals_rest:
            skip = length - len(self._rest(place))
        else:  # the same share of the epoch
            skip = min(length, round(place["batches"] * length / max(1, place["length"])))
        self._next = (place, skip)
        return skip

    def _deals_rest_of(self, place: Place) -> bool:
        """Return True if it resumes the order of `place`, and does not start its own."""
        if "order" not in place or not can_draw(self.sampler, place["order"]):
            return False
        plain = not self.batched or type(self.inner) is BatchSampler  # another may not ask its sampler
        return plain or place["order"]["kind"] == "shared"

    def _rest(self, place: Place) -> Any:
        """Return the sampler of the rest of the order of `place`."""
        part = self._part(place)
        if not self.batched:
            return part
        rest = copy.copy(self.inner)
        rest.sampler = part
        return rest

    def _part(self, place: Place) -> list[Any]:
        """This data rank's share of the samples that no data rank has used yet."""
        now = main_streams(self._generator)
        self._set_streams(place, -1)
        order = full_order(self.sampler, place["order"], _generator_of(place))
        set_streams(now, self._generator)
        left, ranks = order[place["samples"] :], self._ranks
        if self.sampler.drop_last:
            left = left[: len(left) // ranks * ranks]
        elif left:
            left += islice(cycle(order), -len(left) % ranks)
        return left[self.sampler.rank :: ranks]

    def _set_streams(self, place: Place, index: int) -> None:
        if place.get("streams"):
            set_streams(place["streams"][index], self._generator)

    def __iter__(self) -> Iterator[Any]:
        place, _ = self._next
        if place is None:
            streams = [main_streams(self._generator)] if self._drawn else []  # some samplers draw at once, some later
            return self._began(iter(self.inner), streams)
        return self._going_on()  # takes effect when it begins: a loader with workers asks for two and begins the second

    def _going_on(self) -> Iterator[Any]:
        (place, skip), self._next = self._next, (None, 0)
        assert place is not None, "only one iteration resumes from a position"
        if self._deals_rest_of(place):
            order, had, batches = place["order"], place["samples"], iter(self._rest(place))
        else:
            order, had, batches = order_of(self.sampler), *self._again(place, skip)
        yield from self._count(batches, order, place.get("streams", []), skip, had)

    def _began(self, batches: Iterator[Any], streams: list[Streams]) -> Iterator[Any]:
        if self._drawn:
            streams = [*streams, main_streams(self._generator)]
        yield from self._count(batches, order_of(self.sampler), streams)

    def _again(self, place: Place, skip: int) -> tuple[int, Iterator[Any]]:
        """The number of samples in the first `skip` batches, and the batches after them."""
        now = main_streams(self._generator)
        self._set_streams(place, 0)
        batches = iter(self.inner)
        self._set_streams(place, -1)
        had = sum(self._size(batch) for batch in islice(batches, skip))
        set_streams(now, self._generator)
        if self._generator is not None and "generator" in place.get("now", {}):
            self._generator.set_state(place["now"]["generator"])
        return had, batches

    def _count(
        self, batches: Iterator[Any], order: Order, streams: list[Streams], skip: int = 0, samples: int = 0
    ) -> Iterator[Any]:
        self._order, self._streams = order, streams
        self._skipped, self._samples, self._ends = skip, samples, array("q")
        had = 0
        for batch in batches:
            had += self._size(batch)
            self._ends.append(had)
            yield batch

    def _size(self, batch: Any) -> int:
        return len(batch) if self.batched else 1


def _generator_of(place: Place) -> torch.Generator | None:
    """The user's own generator as it was when the order was drawn from it."""
    streams = place.get("streams", [])
    if not streams or "generator" not in streams[-1]:
        return None
    generator = torch.Generator()
    generator.set_state(streams[-1]["generator"])
    return generator
