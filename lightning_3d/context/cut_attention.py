"""Attention over the whole sequence, from queries, keys and values of one part of it.

It stands in the place of `F.scaled_dot_product_attention`, and computes as that does outside of a divided block. Where
the ranks divide the heads of queries and keys, they exchange heads: any kernel and any mask then sees all positions.
Else each rank gathers keys and values for its own queries.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lightning_3d.context.cut_plan import Meeting
from lightning_3d.errors import UnsupportedError
from lightning_3d.module.undo import replaced_attributes
from lightning_3d.ranks.agreement import agree
from lightning_3d.sandbox.silence import SDPA
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.dropout import own_stream
from lightning_3d.tensor.geometry import Interval, TensorSplit, local_part
from lightning_3d.tensor.overlap import as_autocast_would
from lightning_3d.tensor.sequence import enter

Way = Callable[[Sequence[Tensor], Axis, TensorSplit], tuple[Tensor, ...]]
HEADS, POSITIONS = -3, -2
"""Dimensions of queries, keys and values."""


@dataclass
class Part:
    """The part of the sequence that a block computes on."""

    axis: Axis
    split: TensorSplit
    expected: tuple[Meeting, ...] | None = None
    """Of the proven call, one for each call of attention."""
    met: list[Meeting] = field(default_factory=list)
    """Those of the calls up to now."""
    draws: bool = False
    """True where masks of dropout are drawn: not in a proof or a comparison."""
    agreed: bool = True
    """False in the first call with parts of other lengths than before, which differ: only some of them may be refused.
    Ranks then agree before each exchange."""

    @property
    def own(self) -> int:
        return self.split.local_size(self.axis.rank)

    @property
    def runs(self) -> tuple[Interval, ...]:
        """The intervals of own positions in the sequence."""
        return self.split.pieces[self.axis.rank]

    def agree(self, error: Exception | None, at: str) -> None:
        """Raise `error`, or that of another rank. Collective where the ranks have not `agreed` yet."""
        if self.agreed:
            if error is not None:
                raise error
            return
        try:
            agree(error, at, self.axis.group.ranks)
        except Exception:
            self.agreed = True
            raise

    def check_all_met(self) -> None:
        """Raise if attention was called less often than in the proof: by another kernel, which sees this part alone."""
        if self.expected is not None and len(self.met) < len(self.expected):
            raise UnsupportedError(
                f"A block whose sequence context ranks divide called torch's attention {len(self.met)} times, and"
                f" {len(self.expected)} times in its proof. If another kernel computes it here, that sees a part of the"
                " sequence alone. Let the module call torch.nn.functional.scaled_dot_product_attention (Hugging Face:"
                ' attn_implementation="sdpa"), or set context_parallel_size=1.'
            )

    def meets(self, query: Tensor, key: Tensor) -> Meeting:
        """The tokens that meet in the next call of attention."""
        own = self.own
        alone = query.dim() < 3 or query.shape[POSITIONS] != own
        found: Meeting = "alone" if alone else "divided" if key.shape[POSITIONS] == own else "whole"
        if self.expected is not None:
            # a length alone does not tell: a window may be as long as a part
            wanted = self.expected[len(self.met)] if len(self.met) < len(self.expected) else None
            wrong = wanted is None or (found != wanted and (alone or wanted == "divided"))
            error = UnsupportedError(
                f"A block whose sequence context ranks divide calls attention with {tuple(query.shape)} queries and"
                f" {tuple(key.shape)} keys, as its proof did not. It is unknown which of them are divided. Set"
                " context_parallel_size=1 for this module."
            )
            self.agree(error if wrong else None, f"call {len(self.met)} of attention in a block on a part")
            assert wanted is not None
            found = wanted
        self.met.append(found)
        return found


_here = threading.local()  # of each thread, because a proof runs the ranks as threads


def running(part: Part | None) -> AbstractContextManager[None]:
    """Let attention inside see the whole sequence."""
    return replaced_attributes(_here, part=part)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """`F.scaled_dot_product_attention`, also on a part of the sequence."""
    part: Part | None = getattr(_here, "part", None)
    if part is None or (meeting := part.meets(query, key)) == "alone":
        return SDPA(query, key, value, attn_mask, dropout_p, is_causal, **options)
    with own_stream(part.axis, query) if dropout_p > 0 and part.draws else nullcontext():
        return _met(part, meeting == "divided", query, key, value, attn_mask, dropout_p, is_causal, **options)


def _met(
    part: Part,
    divided: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    **options: Any,
) -> Tensor:
    """Attention of the queries of a part."""
    axis, along = part.axis, TensorSplit(POSITIONS, part.split.pieces)
    all_rows = attn_mask is None or attn_mask.shape[POSITIONS] in (1, part.split.size)
    if divided and all_rows and _divide_heads(query, key, value, axis.size):
        query, key, value = _exchanged(_to_heads, [*map(as_autocast_would, (query, key, value))], axis, part.split)
        mask = None if attn_mask is None else _own_heads(attn_mask, axis)
        mixed = SDPA(query, key, value, mask, dropout_p, is_causal, **options)
        return _exchanged(_to_positions, (mixed,), axis, part.split)[0]
    if divided:
        key, value = (enter(tensor, axis, along) for tensor in (key, value))
    if is_causal and attn_mask is None:
        mixed, rows = [], query.split([stop - start for start, stop in part.runs], POSITIONS)
        for own, (start, stop) in zip(rows, part.runs, strict=True):
            keys, values = key[..., :stop, :], value[..., :stop, :]
            seen = torch.ones(stop - start, keys.shape[POSITIONS], dtype=torch.bool, device=query.device)
            mixed.append(SDPA(own, keys, values, seen.tril(start), dropout_p, **options))
        return torch.cat(mixed, POSITIONS)
    if attn_mask is not None and attn_mask.shape[POSITIONS] not in (1, part.own):
        attn_mask = local_part(attn_mask, along, axis.rank)
    return SDPA(query, key, value, attn_mask, dropout_p, is_causal, **options)


def _divide_heads(query: Tensor, key: Tensor, value: Tensor, ranks: int) -> bool:
    """True where ranks exchange heads. With fewer key heads than ranks, or other rows, each gathers all keys."""
    rows = query.shape[:HEADS]
    if not rows or key.shape[:HEADS] != rows or value.shape[:HEADS] != rows:
        return False
    return not any(tensor.shape[HEADS] % ranks for tensor in (query, key, value))


def _own_heads(mask: Tensor, axis: Axis) -> Tensor:
    if mask.dim() < 3 or mask.shape[HEADS] == 1:
        return mask
    return mask.chunk(axis.size, HEADS)[axis.rank]


class _Exchange(torch.autograd.Function):
    """An exchange of heads: each is the backward of the other. One message carries all tensors, whose heads lie side by
    side as one row of features for each position."""

    @staticmethod
    def forward(ctx: Any, way: Way, axis: Axis, split: TensorSplit, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back, ctx.axis, ctx.split = _to_positions if way is _to_heads else _to_heads, axis, split
        return way(tensors, axis, split)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, None, *_exchanged(ctx.back, grads, ctx.axis, ctx.split)


def _exchanged(way: Way, tensors: Sequence[Tensor], axis: Axis, split: TensorSplit) -> tuple[Tensor, ...]:
    graph = torch.is_grad_enabled()  # a backward has none, and a function of autograd costs a host as much as a launch
    return _Exchange.apply(way, axis, split, *tensors) if graph else way(tensors, axis, split)


def _to_heads(tensors: Sequence[Tensor], axis: Axis, split: TensorSplit) -> tuple[Tensor, ...]:
    """All positions of this rank's share of the heads, from own positions of all heads."""
    size = axis.size
    # ranks x batch x positions x features of the heads of each: one copy, which is the message
    by_rank = (tensor.transpose(HEADS, POSITIONS).unflatten(-2, (size, -1)).movedim(-3, 0) for tensor in tensors)
    rows = [each.flatten(-2) for each in by_rank]
    apart = torch.cat(rows, -1)
    own, width = split.local_size(axis.rank), apart.shape[-1]
    receives = [apart[0].numel() // own * split.local_size(rank) for rank in range(size)]
    found = axis.all_to_all(apart.view(-1), [apart[0].numel()] * size, receives)
    parts = [part.view(*apart.shape[1:-2], -1, width) for part in found.split(receives)]
    joined = torch.cat([parts[rank].narrow(-2, at, length) for rank, at, length in _runs(split)], -2)
    pieces = joined.split([row.shape[-1] for row in rows], -1)
    return tuple(_heads(piece, tensor.shape[-1]) for piece, tensor in zip(pieces, tensors, strict=True))


def _to_positions(tensors: Sequence[Tensor], axis: Axis, split: TensorSplit) -> tuple[Tensor, ...]:
    """Own positions of all heads, from all positions of this rank's share of the heads."""
    size, own = axis.size, split.local_size(axis.rank)
    # positions x batch x features of the heads of each, with the positions of the first rank first
    rows = [tensor.transpose(HEADS, POSITIONS).flatten(-2).movedim(-2, 0) for tensor in tensors]
    widths, sizes = [row.shape[-1] for row in rows], [split.local_size(rank) for rank in range(size)]
    joined = rows[0].new_empty(*rows[0].shape[:-1], sum(widths))
    for row, place in zip(rows, joined.split(widths, -1), strict=True):
        torch.cat([row[start:stop] for pieces in split.pieces for start, stop in pieces], out=place)
    each = joined[0].numel()
    found = axis.all_to_all(joined.view(-1), [each * count for count in sizes], [each * own] * size)
    apart = found.view(size, own, *joined.shape[1:]).movedim(1, -2).split(widths, -1)
    return tuple(
        _heads(torch.cat(piece.unbind(), -1), tensor.shape[-1]) for piece, tensor in zip(apart, tensors, strict=True)
    )


@lru_cache(256)
def _runs(split: TensorSplit) -> tuple[tuple[int, int, int], ...]:
    """The rank of each run of positions, in order; where it begins in the rank's part, and its length."""
    boxes = sorted((run, rank, own) for rank in range(split.ranks) for run, own in split.boxes(rank))
    return tuple((rank, low, high - low) for _, rank, (low, high) in boxes)


def _heads(rows: Tensor, features: int) -> Tensor:
    """Heads of so many `features` each, which lie side by side in `rows`."""
    return rows.unflatten(-1, (-1, features)).transpose(HEADS, POSITIONS)
