"""One change of a module's attributes, from those that the microbatches of a batch made.

Every microbatch began with the attributes as they were before the batch. The rule, for a value that they left:

- integers: what was there plus the sum of the differences, but once for a count of batches: every difference is 1, or
  the full batch and parts of it were seen to add the same;
- equal everywhere: that value;
- floats and tensors of no dimension: the mean, weighted by the sizes of the microbatches;
- tensors with a row per sample, and lists: joined;
- anything else: the last one, with a warning that names the attribute.

An integer that a step sets, such as a length, looks like one that it adds to. It is added up as long as it grows, and
named in a warning once it does not.
"""

import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_3d.sandbox.snapshot import Changes, Path
from lightning_3d.sandbox.trees import detached, form, is_whole, join_outputs, untrace, weighted_mean

_SIMPLE = (str, bytes, int, float, complex, type(None))


def join_changes(
    runs: list[Changes], sizes: list[int], before: Mapping[str, Any], alike: Collection[str] = ()
) -> Changes:
    """The changes of one run on the full batch.

    Attributes that are `alike` have a count of batches, or tensors of one shape, whatever the rows are.
    """
    if len(runs) == 1:
        return {path: (kind, detached(untrace(value))) for path, (kind, value) in runs[0].items()}
    paths = dict.fromkeys(path for run in runs for path in run)
    return {path: _joined(path, runs, sizes, _at(before, path), path[0] in alike) for path in paths}


def _joined(path: Path, runs: list[Changes], sizes: list[int], before: Any, alike: bool) -> tuple[str, Any]:
    changes = [(*run[path], size) for run, size in zip(runs, sizes, strict=True) if path in run]
    kind = changes[0][0]
    values = [detached(untrace(value)) for its, value, _ in changes if its == kind]
    sizes = [size for its, _, size in changes if its == kind]
    if kind == "append":
        return kind, _list(path, values, sizes)
    if kind == "refill":
        return kind, _container(path, before, values, sizes)
    everywhere = len(values) == len(runs)
    if alike and everywhere and all(map(is_whole, values)) and len(set(map(int, values))) == 1:
        return kind, values[0]
    return kind, _value(path, before, values, sizes, everywhere=everywhere, rows=kind == "set" and not alike)


def _at(before: Mapping[str, Any], path: Path) -> Any:
    value: Any = before
    for key in path:
        if isinstance(value, dict):
            value = value.get(key)
        else:
            value = value[key] if isinstance(value, list | tuple) and key < len(value) else None
    return value


def _container(path: Path, before: Any, values: list[Any], sizes: list[int]) -> Any:
    if isinstance(before, Counter):
        total = Counter(before)
        for value in values:
            total.update({key: value[key] - before[key] for key in value.keys() | before.keys()})
        return total
    return set[Any]().union(*values) if isinstance(before, set) else _in_turn(path, values, sizes)


def _list(path: Path, values: list[list[Any]], sizes: list[int]) -> list[Any]:
    """Entries of the microbatches: one for each sample, or one for the batch."""
    lengths = [len(value) for value in values]
    if len(set(lengths)) > 1 or (lengths == sizes and lengths[0] > 1):
        return [entry for value in values for entry in value]
    return _in_turn(path, values, sizes)


def _in_turn(path: Path, values: list[Any], sizes: list[int]) -> list[Any]:
    columns = enumerate(zip(*values, strict=False))
    return [_value((*path, f"[{at}]"), None, list(entries), sizes) for at, entries in columns]


def _value(
    path: Path, before: Any, values: list[Any], sizes: list[int], *, everywhere: bool = True, rows: bool = True
) -> Any:
    """The value of the full batch, which all microbatches changed if `everywhere`.

    With `rows` a tensor may have a row per sample; not one that was written into.
    """
    first, last = values[0], values[-1]
    if isinstance(first, np.ndarray) and first.dtype.kind in "biufc":
        old = torch.as_tensor(before) if isinstance(before, np.ndarray) else before
        tensors = [torch.as_tensor(value) for value in values]
        return np.asarray(_value(path, old, tensors, sizes, everywhere=everywhere, rows=rows))
    if all(is_whole(value) for value in values) and (before is None or is_whole(before)):
        return _integer(path, before, values, sizes, everywhere)
    if all(_is_table(before, value) for value in values) and not (rows and [*map(len, values)] == sizes):
        return before + sum(value - before for value in values)
    if all(value is first or (isinstance(first, _SIMPLE) and value == first) for value in values):
        return first
    if isinstance(first, set):
        return set[Any]().union(*values)
    if all(isinstance(value, list) for value in values):
        return _list(path, values, sizes)
    if len(set(map(type, values))) > 1 or len({repr(form(value)) for value in values}) > 1:
        return _last(path, last)
    if isinstance(first, Tensor) and not rows and first.dtype is not torch.bool:
        return weighted_mean(values, [size / sum(sizes) for size in sizes]).to(first.dtype)
    if isinstance(first, Tensor | float | np.floating | dict | tuple):
        return join_outputs(values, sizes)
    return _last(path, last)


def _integer(path: Path, before: Any, values: list[Any], sizes: list[int], everywhere: bool) -> Any:
    # such as `self.batch_size = len(x)`; an entry of a list may be an index that is as large by chance
    entry = str(path[-1]).startswith("[")
    rows = not entry and [int(value) for value in values] == sizes and sizes[0] > 1
    if before is None:
        if not rows and isinstance(path[-1], str) and len({int(value) for value in values}) == 1:
            return values[0]
        return sum(values)  # counted under a new key, of a class in the data
    steps = [int(value - before) for value in values]
    if min(steps) < 0:
        if rows:
            return sum(values)
        if any(int(value) for value in values):  # 0 again is the index of an epoch's first batch
            warnings.warn(
                f"training_step sets the integer self.{_name(path)} to a lower value. Under a pipeline, integers are"
                " taken for counts: what the microbatches add is added up. That is wrong for an integer that is set,"
                " such as a length. Set it in on_train_batch_start, or use num_microbatches=1.",
                stacklevel=2,
            )
        return values[-1]
    once = everywhere and set(steps) == {1} and isinstance(path[-1], str)
    return values[0] if once else before + sum(steps)


def _is_table(before: Any, value: Any) -> bool:
    """True for counts in a tensor (a confusion matrix, often of floats): no element shrinks, or grows by a fraction."""
    tensors = isinstance(before, Tensor) and isinstance(value, Tensor) and value.ndim and value.shape == before.shape
    if not tensors or value.is_complex() or value.dtype is torch.bool:
        return False
    step = value.double() - before.double()
    return bool(((step >= 0) & (step == step.round())).all())


def _last(path: Path, value: Any) -> Any:
    warnings.warn(
        f"The microbatches of a batch leave different values in self.{_name(path)}, which cannot be joined"
        f" ({type(value).__name__}). That of the last microbatch is kept; one device would have that of the full"
        " batch. Set it in on_train_batch_end, or use num_microbatches=1.",
        stacklevel=2,
    )
    return value


def _name(path: Path) -> str:
    return ".".join(map(str, path))
