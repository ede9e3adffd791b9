"""`TensorPlan`: what is split how, and what stays whole and why. Pure data, equal on every rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lightning_3d.tensor.geometry import TensorSplit

Attribute = tuple[str, str]
"""Name of a module and path of one of its attributes ("num_heads", "config.n_head")."""


@dataclass(frozen=True)
class SequencePlan:
    """How a block's residual stream is divided between its split regions."""

    dim: int
    """The dimension of positions."""
    stream: int
    """Which tensor argument is the stream."""
    results: tuple[int, ...]
    """Which results are."""
    entries: tuple[str, ...]
    """Modules at whose input the whole sequence is gathered."""
    outer: tuple[str, ...]
    """Parameters used on parts of the sequence."""


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """How one block is computed in shards. Every name is relative to the block."""

    splits: Mapping[str, TensorSplit] = field(default_factory=dict)
    """Parameters of which each rank holds a shard."""
    slices: Mapping[str, TensorSplit] = field(default_factory=dict)
    """Parameters that every rank holds whole but computes with its own, overlapping, part of: key heads fewer than
    ranks."""
    summed: tuple[str, ...] = ()
    """Whole parameters used inside a split region: each rank finds a part of their gradient."""
    shared: tuple[str, ...] = ()
    """Biases added before a sum over the ranks: each rank adds its share."""
    copies: tuple[str, ...] = ()
    """Modules whose input enters a split region."""
    emits: tuple[str, ...] = ()
    """Modules whose output enters a split region."""
    mixes: Mapping[str, TensorSplit] = field(default_factory=dict)
    """Modules inside a split region that take all of its channels: gathered before them, own part taken after."""
    reduces: tuple[str, ...] = ()
    """Modules whose output is a partial sum."""
    holders: tuple[tuple[str, str], ...] = ()
    """(parameter, module in whose forward it is used) for every parameter that is not used as it is."""
    inputs: Mapping[int, TensorSplit | None] = field(default_factory=dict)
    """Tensor arguments of the block used inside a region: None where whole, else each rank takes its part."""
    folded: tuple[int, ...] = ()
    """Those of `inputs` whose rows and heads are folded into one dimension: each row is divided."""
    outputs: Mapping[int, TensorSplit] = field(default_factory=dict)
    """Tensor results of the block that each rank has a part of: they are gathered."""
    results: int = 0
    """How many tensors the block gives back."""
    attributes: Mapping[Attribute, tuple[Any, ...]] = field(default_factory=dict)
    """Attributes that shrink with the shard: the value on each rank."""
    edges: tuple[tuple[tuple[str, ...], ...], ...] = ()
    """For each region, sets of modules at whose inputs all of it begins."""
    sequence: SequencePlan | None = None
    """Set where the residual stream is divided too (`sequence_parallel`)."""
    decoys: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Modules that read the width of a head's or hidden dimension off their input: the width that they see on each
    rank."""
    summed_per_position: int = 0
    """Elements that one forward and backward sum over the ranks, for each position of the batch."""
    dropouts: tuple[bool, ...] = ()
    """For each random call of a training forward, in order: whether it acts on a shard (masks differ over ranks)."""

    forms: tuple[Any, ...] = ()
    """(training mode, form of the arguments) of the calls that are proven; without any, every call is trusted."""

    @property
    def patched(self) -> tuple[str, ...]:
        """Modules of the block that get another forward."""
        entries = self.sequence.entries if self.sequence is not None else ()
        edges = (*self.copies, *self.emits, *self.mixes, *self.reduces, *self.decoys, *entries)
        return tuple(dict.fromkeys((*edges, *(holder for _, holder in self.holders))))

    def merged(self, other: "UnitPlan") -> "UnitPlan":
        """Both regions of one block."""
        union = lambda ours, theirs: tuple(dict.fromkeys((*ours, *theirs)))  # noqa: E731
        return replace(
            self,
            splits={**self.splits, **other.splits},
            slices={**self.slices, **other.slices},
            summed=union(self.summed, other.summed),
            shared=union(self.shared, other.shared),
            copies=union(self.copies, other.copies),
            emits=union(self.emits, other.emits),
            mixes={**self.mixes, **other.mixes},
            reduces=union(self.reduces, other.reduces),
            edges=(*self.edges, *other.edges),
            holders=union(self.holders, other.holders),
            inputs={**self.inputs, **other.inputs},
            folded=union(self.folded, other.folded),
            outputs={**self.outputs, **other.outputs},
            attributes={**self.attributes, **other.attributes},
            decoys={**self.decoys, **other.decoys},
        )


@dataclass(frozen=True)
class TensorPlan:
    """The plan for a whole module."""

    size: int
    """Ranks on the tensor axis."""
    units: Mapping[str, UnitPlan]
    """Blocks that are computed in shards, by name."""
    vocabulary: Mapping[str, TensorSplit] = field(default_factory=dict)
    """Parameters of embeddings and output heads that are split by vocabulary."""
    splits: Mapping[str, TensorSplit] = field(default_factory=dict)
    """Every split parameter of the module, by its full name (each name of a tied parameter)."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """Modules with large matrices that stay whole, and why."""
