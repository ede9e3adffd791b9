"""`ContextPlan`: which arguments of each block are cut along the sequence. Pure data, equal on every rank."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

from lightning_3d.tensor.geometry import TensorSplit
from lightning_3d.tensor.tensor_plan import Attribute, UnitPlan

Meeting = Literal["alone", "divided", "whole"]
"""The tokens that a query sees: those of the call alone, those of all parts, or keys that are whole on each rank."""
ENOUGH = 4
"""Positions for each rank in a proof, at least."""
LEAST = 2
"""Positions of the shortest part. Code that sees one position takes it for a step of generation."""


@dataclass(frozen=True, kw_only=True)
class BlockCut:
    """The way in which one block computes on a part of the sequence. Tensors are numbered, of arguments or results."""

    stream: int
    """The hidden states among the tensor arguments."""
    dim: int
    """Their dimension of positions."""
    arguments: Mapping[int, int] = field(default_factory=dict)
    """Other arguments that are cut, and along which dimension. The rest stay whole."""
    results: Mapping[int, int] = field(default_factory=dict)
    """Results that are cut, and along which dimension."""
    eager: tuple[str, ...] = ()
    """Modules whose attention of Hugging Face computes by torch's function instead of products or another kernel."""
    rows: int | None = None
    """The only number of rows for which it is proven; None where any is right."""
    form: Any = None
    """Of the arguments of the proven call. A call of another form computes whole."""
    attention: tuple[Meeting, ...] | None = None
    """For each call of attention its `Meeting`. None in a proof, which finds them by lengths that tell them apart."""
    draws: tuple[str | None, ...] = ()
    """For each random call of a training forward its module of dropout, None for other code."""
    on_part: tuple[bool, ...] = ()
    """True for each of them that acts on a part. Ranks draw the others alike."""
    reads: tuple[Attribute, ...] = ()
    """The plain attributes that its code reads. Where code around it changes one, the block is compared again."""
    heads: UnitPlan | None = None
    """For a block that mixes positions otherwise: each rank computes some of its heads, or channels, of all positions
    where it does, from slices of whole weights."""
    follows: bool = False
    """True for a module behind blocks: it takes the part that they leave, and divides nothing itself."""


@dataclass(frozen=True)
class ContextPlan:
    size: int
    """Context ranks."""
    blocks: Mapping[str, BlockCut]
    """Blocks that compute on a part of the sequence, by name."""
    whole: Mapping[str, str] = field(default_factory=dict)
    """Blocks that compute on all of it, and why."""
    elements: Mapping[str, int] = field(default_factory=dict)
    """Of the hidden states of each block in the first batch."""
    ends: Mapping[str, BlockCut] = field(default_factory=dict)
    """Modules that follow blocks and compute token by token: norms, heads of several layers."""
    gathered: Mapping[str, str] = field(default_factory=dict)
    """Other modules that take hidden states alone, and why they get those of all ranks."""

    @property
    def line(self) -> str:
        last = self.elements.get([*self.blocks][-1], 0)
        shares = sum(cut.heads is not None for cut in self.blocks.values())
        heads = f" ({shares} of them on a share of the heads where positions meet)" if shares else ""
        gathered = f"; on all positions: {listed(self.gathered)}" if self.gathered else ""
        return (
            f"  context: {len(self.blocks)} of {len(self.blocks) + len(self.whole)} blocks compute on a part of the"
            f" sequence{heads}; behind the last one norm, head and F.cross_entropy do too, and for any other use every"
            f" rank gathers {last:,} numbers of the first batch{gathered}"
        )

    @property
    def warning(self) -> str | None:
        """One line about the blocks that stay whole. None without any."""
        if not self.whole:
            return None
        share = sum(self.elements.get(name, 0) for name in self.whole) / max(1, sum(self.elements.values()))
        return (
            f"{len(self.whole)} blocks ({share:.0%} of the hidden states) compute on the whole sequence on each context"
            f" rank. {listed(self.whole)}."
        )


def listed(reasons: Mapping[str, str]) -> str:
    """The reasons of modules by name, once for each kind."""
    return "; ".join(dict.fromkeys(f"{re.sub(r'[0-9]+', '*', name)}: {why}" for name, why in reasons.items()))


@lru_cache(256)
def parts_of(dim: int, size: int, ranks: int, later: bool = False) -> TensorSplit:
    """Nearly equal parts of `size` positions along `dim`: a run from the head, and one from the tail, for each rank.

    A causal query meets the keys before it. With a run of each kind, all ranks have equal work where keys are gathered.
    In `later` parts each run but the first begins half of its length later.

    >>> parts_of(1, 8, 2).pieces
    (((0, 2), (6, 8)), ((2, 6),))
    """
    short, longer = divmod(size, 2 * ranks)
    starts = [run * short + min(run, longer) + later * (short // 2) for run in range(1, 2 * ranks)]
    runs = [*pairwise((0, *starts, size))]
    *pairs, ((start, _), (_, stop)) = [(runs[rank], runs[-1 - rank]) for rank in range(ranks)]
    return TensorSplit(dim, (*pairs, ((start, stop),)))
