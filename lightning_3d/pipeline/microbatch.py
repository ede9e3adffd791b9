"""Cuts a batch into microbatches.

The batch size is dimension 0 of most tensors in the batch. Tensors of that length are cut along it, and so are lists
of that length that hold no such tensor (captions, one dict per image); every microbatch gets
everything else in full. A tensor whose first dimension has that length by chance (class weights) is cut too: give it
another shape.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_3d.sandbox.trees import _SIMPLE, children, leaves, rebuild


def batch_size(batch: Any) -> int | None:
    """Rows in the batch, None where it has no batch dimension or holds something that cannot be cut."""
    if _is_packed(batch):
        return None
    sizes: Counter[int] = Counter()
    for leaf in leaves(batch):
        if isinstance(leaf, Tensor):
            if leaf.ndim and type(leaf) is Tensor:
                sizes[leaf.shape[0]] += 1
        elif not isinstance(leaf, _SIMPLE):
            return None
    return sizes.most_common(1)[0][0] if sizes else None


def _is_packed(value: Any) -> bool:
    """True for a value with a PackedSequence in it, whose rows are steps of all samples in turn."""
    return isinstance(value, PackedSequence) or any(map(_is_packed, children(value) or ()))


def split_sizes(rows: int, pieces: int) -> list[int]:
    """Sizes of the microbatches: as equal as they can be, the larger ones first."""
    pieces = max(1, min(pieces, rows))
    small, larger = divmod(rows, pieces)
    return [small + 1] * larger + [small] * (pieces - larger)


def auto_microbatches(rows: int | None, stages: int) -> int:
    """The largest divisor of `rows` up to 4 per stage, or 2 per stage with unequal sizes if that leaves too few."""
    if rows is None or stages == 1:
        return 1
    best = max(count for count in range(1, 4 * stages + 1) if rows % count == 0)
    return best if best >= min(stages, rows) else min(rows, 2 * stages)


def microbatch_sizes(batch: Any, count: int | Literal["auto"], ranks: int) -> list[int]:
    """Rows of each microbatch of a batch; [1] where it has no rows to cut."""
    rows = batch_size(batch)
    if not rows:
        return [1]
    return split_sizes(rows, auto_microbatches(rows, ranks) if count == "auto" else count)


def split_batch(batch: Any, sizes: list[int]) -> list[Any]:
    """The microbatches of `batch`, of `sizes` rows each."""
    if len(sizes) == 1:
        return [batch]
    rows = sum(sizes)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [_take(batch, rows, start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _take(value: Any, rows: int, start: int, stop: int) -> Any:
    if isinstance(value, Tensor):
        return value[start:stop] if value.ndim and value.shape[0] == rows else value
    inner = children(value)
    if inner is None:
        return value
    if isinstance(value, list | tuple) and len(value) == rows and not hasattr(value, "_fields"):
        rowwise = any(isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == rows for leaf in leaves(value))
        if not rowwise:
            return type(value)(value[start:stop])
    return rebuild(value, [_take(item, rows, start, stop) for item in inner])


def signature(value: Any) -> Any:
    """Nesting, shapes and types: one rehearsal is valid for all microbatches of the same signature."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype, value.requires_grad)
    inner = children(value)
    if inner is None:
        return type(value)
    keys = tuple(value) if isinstance(value, Mapping) else None
    return (type(value), keys, tuple(signature(item) for item in inner))
