"""Cutting a batch into microbatches, and putting what the steps returned together again.

The batch size is dimension 0 of most tensors in the batch. Tensors of that length are cut along it, and so are lists
of that length that hold no such tensor (captions, one dict per image); everything else goes whole to every microbatch.
A tensor whose first dimension has that length by chance (class weights, say) is cut too: give it another shape.
"""

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

_SIMPLE = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


def children(value: Any) -> list[Any] | None:
    """What a container holds, None for a leaf."""
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def rebuild(value: Any, items: list[Any]) -> Any:
    """A container like `value` that holds `items`."""
    if isinstance(value, Mapping):
        if type(value) is dict:
            return dict(zip(value, items, strict=True))
        result: Any = copy.copy(value)
        for key, item in zip(value, items, strict=True):
            result[key] = item
        return result
    if isinstance(value, list | tuple):
        if hasattr(value, "_make"):
            return value._make(items)  # not its own `__new__`: a PackedSequence's looks at the tensors
        return type(value)(items)
    result = copy.copy(value)
    for field, item in zip(dataclasses.fields(value), items, strict=True):
        object.__setattr__(result, field.name, item)
    return result


def leaves(value: Any) -> Iterator[Any]:
    inner = children(value)
    if inner is None:
        yield value
    else:
        for item in inner:
            yield from leaves(item)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    inner = children(value)
    if inner is None:
        return function(value)
    items = [map_leaves(function, item) for item in inner]
    if all(new is old for new, old in zip(items, inner, strict=True)):
        return value
    return rebuild(value, items)


def unshared(value: Any) -> Any:
    """The leaves of `value` in containers of their own: a step may take entries out of its batch (`batch.pop`)."""
    inner = children(value)
    return value if inner is None else rebuild(value, [unshared(item) for item in inner])


def detached(value: Any) -> Any:
    """`value` without its graph."""
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def form(value: Any) -> Any:
    """The containers of `value`, without what they hold."""
    return map_leaves(lambda _: None, value)


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
    """Whether a PackedSequence is in it, whose rows are steps of all samples in turn."""
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
    """What two microbatches must share for one rehearsal to hold for both: nesting, shapes, types."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype, value.requires_grad)
    inner = children(value)
    if inner is None:
        return type(value)
    keys = tuple(value) if isinstance(value, Mapping) else None
    return (type(value), keys, tuple(signature(item) for item in inner))


def weighted_mean(values: list[Any], weights: list[float]) -> Any:
    """Mean of numbers or tensors, computed in their own type; one value is returned as it is."""
    if len(values) == 1:
        return values[0]
    return sum(value * weight for value, weight in zip(values, weights, strict=True))


def join_outputs(outputs: list[Any], sizes: list[int]) -> Any:
    """One step's output from those of its microbatches.

    Tensors with a row per sample, or as many rows for each (tokens), are joined, and so are those that differ in length
    only; scalars and tensors of one shape are averaged by size, lists of one entry per sample joined. Arrays of numpy
    are treated like tensors. Of anything else the first microbatch's value is kept.
    """
    if len(outputs) == 1:
        return outputs[0]
    first = outputs[0]
    if isinstance(first, np.ndarray) and first.dtype.kind in "biufc":
        return join_outputs([torch.as_tensor(out) for out in outputs], sizes).numpy()
    if isinstance(first, Tensor):
        if _in_rows(outputs, sizes):
            return torch.cat(outputs)
        weights = [size / sum(sizes) for size in sizes]
        same = all(out.shape == first.shape for out in outputs)
        return weighted_mean(outputs, weights) if first.is_floating_point() and same else first
    if isinstance(first, float | np.floating):
        return weighted_mean(outputs, [size / sum(sizes) for size in sizes])
    inner = children(first)
    if inner is None:
        return first
    if isinstance(first, list) and all(_per_sample(out, size) for out, size in zip(outputs, sizes, strict=True)):
        return [item for out in outputs for item in out]
    columns = zip(*(children(out) or [] for out in outputs), strict=True)
    return rebuild(first, [join_outputs(list(column), sizes) for column in columns])


def _in_rows(outputs: list[Tensor], sizes: list[int]) -> bool:
    """Whether tensors are parts of one: rows for each sample, or of another length for each microbatch."""
    if not outputs[0].ndim or len({out.shape[1:] if out.ndim else None for out in outputs}) > 1:
        return False
    lengths = [out.shape[0] for out in outputs]
    for_each = lengths[0] // sizes[0]
    if for_each and all(length == for_each * size for length, size in zip(lengths, sizes, strict=True)):
        return True
    if len(set(lengths)) > 1 or outputs[0].is_floating_point():
        return len(set(lengths)) > 1
    return any(type(out) is Tensor and not out.equal(outputs[0]) for out in outputs)  # a dry run's have no values


def _per_sample(output: list[Any], size: int) -> bool:
    """Whether a list has one entry per sample, rather than being a few tensors with a row per sample."""
    rowwise = any(isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == size for leaf in output)
    return len(output) == size and not rowwise
