"""`TensorPlan`: how each block is split, and why some matrices stay unsplit. Pure data, equal on every rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_3d.tensor.geometry import TensorSplit

Attribute = tuple[str, str]
"""Name of a module and path of one of its attributes ("num_heads", "config.n_head")."""


@dataclass(frozen=True)
class SequencePlan:
    """Division of a block's residual stream between its split regions."""

    dim: int
    """The dimension of positions."""
    stream: int
    """Index of the stream among the tensor arguments."""
    results: tuple[int, ...]
    """Indices of the results that are the stream."""
    entries: tuple[str, ...]
    """Modules at whose input the full sequence is gathered."""
    outer: tuple[str, ...]
    """Parameters used on shards of the sequence."""


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """The way in which one block is computed in shards. Every name is relative to the block."""

    splits: Mapping[str, TensorSplit] = field(default_factory=dict)
    """Parameters that are sharded."""
    slices: Mapping[str, TensorSplit] = field(default_factory=dict)
    """Unsplit parameters of which each rank uses a slice. Slices overlap: key heads fewer than ranks."""
    summed: tuple[str, ...] = ()
    """Unsplit parameters used inside a split region: the gradient is the sum over the ranks."""
    shared: tuple[str, ...] = ()
    """Biases added before a sum over the ranks: each rank adds a fraction."""
    copies: tuple[str, ...] = ()
    """Modules whose input enters a split region."""
    emits: tuple[str, ...] = ()
    """Modules whose output enters a split region."""
    mixes: Mapping[str, TensorSplit] = field(default_factory=dict)
    """Modules inside a split region that need all of its channels: gathered before, own shard taken after."""
    reduces: tuple[str, ...] = ()
    """Modules whose output is a partial sum."""
    routes: Mapping[str, TensorSplit] = field(default_factory=dict)
    """Experts that are called with numbers of experts: the numbers of each rank."""
    owners: Mapping[str, int] = field(default_factory=dict)
    """Experts of a list: the rank that computes each. The others return zeros."""
    holders: tuple[tuple[str, str], ...] = ()
    """(parameter, module in whose forward it is used) for every parameter that does not enter unchanged."""
    inputs: Mapping[int, TensorSplit | None] = field(default_factory=dict)
    """Tensor arguments of the block used inside a region: their split, or None where they stay unsplit."""
    folded: tuple[int, ...] = ()
    """Those of `inputs` whose rows and heads are folded into one dimension: each row is divided."""
    outputs: Mapping[int, TensorSplit] = field(default_factory=dict)
    """Tensor results of the block that are sharded, and gathered at its end."""
    results: int = 0
    """Number of tensors that the block returns."""
    attributes: Mapping[Attribute, tuple[Any, ...]] = field(default_factory=dict)
    """Attributes that shrink with the shard: the value on each rank."""
    edges: tuple[tuple[tuple[str, ...], ...], ...] = ()
    """For each region, sets of modules at whose inputs all of it begins."""
    sequence: SequencePlan | None = None
    """Set where the residual stream is divided too (`sequence_parallel`)."""
    decoys: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Modules that read the width of a head or hidden dimension off their input: the width they find on each rank."""
    summed_per_position: int = 0
    """Elements that one forward and backward sum over the ranks, for each position of the batch."""
    dropouts: tuple[bool, ...] = ()
    """For each random call of a training forward, in order: True where it acts on a shard (masks differ by rank)."""
    dropout_modules: tuple[str | None, ...] = ()
    """The `nn.Dropout` module of the block that makes each of these calls, None for other code and a rate of 0."""

    forms: tuple[Any, ...] = ()
    """(training mode, form of the arguments) of the proven calls. Where empty, every call is trusted."""

    @property
    def patched(self) -> tuple[str, ...]:
        """Modules of the block that get another forward."""
        entries = self.sequence.entries if self.sequence is not None else ()
        edges = (*self.copies, *self.emits, *self.mixes, *self.reduces, *self.owners, *self.decoys, *entries)
        return tuple(dict.fromkeys((*edges, *(holder for _, holder in self.holders))))

    @property
    def fractions(self) -> list[tuple[tuple[int, int], ...]]:
        """For each distinct split: (size of the shard, full size) on each rank."""
        splits = (*self.splits.values(), *self.slices.values())
        ways = (tuple((split.local_size(rank), split.size) for rank in range(split.ranks)) for split in splits)
        return list(dict.fromkeys(ways))

    def merged(self, other: "UnitPlan") -> "UnitPlan":
        both: dict[str, Any] = {name: getattr(self, name) | getattr(other, name) for name in _BY_NAME}
        both |= {name: tuple(dict.fromkeys(getattr(self, name) + getattr(other, name))) for name in _LISTED}
        return replace(self, **both, edges=(*self.edges, *other.edges))

    def renamed(self, old: str, new: str) -> "UnitPlan":
        """The plan of the module `old` alone, under the name `new`."""

        def is_inside(name: str) -> bool:
            return name == old or name.startswith(f"{old}.")

        def rename(name: str) -> str:
            return new + name.removeprefix(old) if is_inside(name) else name

        def names(found: tuple[str, ...]) -> Any:
            return tuple(rename(name) for name in found if is_inside(name))

        def keys(found: Mapping[str, Any]) -> Any:
            return {rename(name): value for name, value in found.items() if is_inside(name)}

        return UnitPlan(
            **{name: names(getattr(self, name)) for name in ("summed", "shared", "copies", "emits", "reduces")},
            **{name: keys(getattr(self, name)) for name in ("splits", "slices", "mixes", "decoys")},
            holders=tuple((rename(name), rename(holder)) for name, holder in self.holders if is_inside(name)),
            attributes={(rename(name), path): v for (name, path), v in self.attributes.items() if is_inside(name)},
        )


_BY_NAME = ("splits", "slices", "mixes", "routes", "owners", "inputs", "outputs", "attributes", "decoys")
_LISTED = ("summed", "shared", "copies", "emits", "reduces", "holders", "folded")
"""What each region of a block has of its own."""


@dataclass(frozen=True)
class TensorPlan:
    size: int
    """Ranks on the tensor axis."""
    units: Mapping[str, UnitPlan]
    """Blocks that are computed in shards, by name."""
    vocabulary: Mapping[str, TensorSplit] = field(default_factory=dict)
    """Parameters of embeddings and output heads that are split by vocabulary."""
    splits: Mapping[str, TensorSplit] = field(default_factory=dict)
    """Every split parameter of the module, by its full name (each name of a tied parameter)."""
    unsplit: Mapping[str, str] = field(default_factory=dict)
    """Modules with large matrices that stay unsplit, and why."""
