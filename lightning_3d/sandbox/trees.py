"""Nested containers of tensors and plain values: the batches, outputs and attributes of a step."""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from torch import Tensor, nn

SIMPLE = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


def children(value: Any) -> list[Any] | None:
    """The entries of a container, None for a leaf."""
    if isinstance(value, Tensor):  # nearly all leaves, and the other questions cost more
        return None
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return None


def rebuild(value: Any, items: list[Any]) -> Any:
    """A container like `value` with `items` as its entries."""
    if isinstance(value, Mapping):
        if type(value) is dict or not isinstance(value, MutableMapping):
            return dict(zip(value, items, strict=True))
        result: Any = copy.copy(value)
        for key, item in zip(value.keys(), items, strict=True):  # a TensorDict iterates over its rows
            result[key] = item
        return result
    if isinstance(value, list | tuple):
        if hasattr(value, "_make"):
            return value._make(items)  # not its own `__new__`: a PackedSequence's looks at the tensors
        return tuple(items) if isinstance(value, torch.Size) else type(value)(items)  # a Size holds numbers only
    result = copy.copy(value)
    for field, item in zip(dataclasses.fields(value), items, strict=True):
        object.__setattr__(result, field.name, item)
    return result


def has_row_count(value: Any) -> bool:
    """Return True for a TensorDict: cut and joined as a tensor, since it takes no entry with another number of rows."""
    return isinstance(size := getattr(value, "batch_size", None), torch.Size) and len(size) > 0


def leaves(value: Any) -> list[Any]:
    return _collect(value, [])  # a generator for each container takes twice the time


def _collect(value: Any, found: list[Any]) -> list[Any]:
    inner = children(value)
    if inner is None:
        found.append(value)
    else:
        for item in inner:
            _collect(item, found)
    return found


def tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def values_at(value: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Nested containers, outermost first, and leaves, each with its place: positions in the containers around it."""
    yield path, value
    for at, item in enumerate(children(value) or ()):
        yield from values_at(item, (*path, at))


def tensors_at(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """The tensors in nested dicts, lists and tuples, each with the keys and indices that find it."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors_at(item, (*path, key))


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    return _mapped(function, value)[0]


def _mapped(function: Callable[[Any], Any], value: Any) -> tuple[Any, bool]:
    """`value` with its leaves mapped, and True where one is another object now.

    Containers are not compared: dynamo (torch 2.13) does not know if two tuples that it follows are one object.
    """
    inner = children(value)
    if inner is None:
        leaf = function(value)
        return leaf, leaf is not value
    items, changed = [], False
    for item in inner:
        new, other = _mapped(function, item)
        items.append(new)
        changed |= other
    return (rebuild(value, items), True) if changed else (value, False)


def unshared(value: Any) -> Any:
    """The leaves of `value` in containers of their own: a step may take entries out of its batch (`batch.pop`)."""
    inner = children(value)
    return value if inner is None else rebuild(value, [unshared(item) for item in inner])


def copied(value: Any) -> Any:
    """A copy of a batch for one run of a step, which may write into it."""

    def cloned(leaf: Any) -> Any:
        return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf

    return map_leaves(cloned, unshared(value))


def detached(value: Any) -> Any:
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def form(value: Any) -> Any:
    """The containers of `value`, with None for every leaf."""
    return map_leaves(lambda _: None, value)


def weighted_mean(values: list[Any], weights: list[float]) -> Any:
    """Mean of numbers or tensors, computed in their own type; one value is returned as it is."""
    if len(values) == 1:
        return values[0]
    return sum(value * weight for value, weight in zip(values, weights, strict=True))


def join_outputs(outputs: list[Any], sizes: list[int]) -> Any:
    """One step's output from those of its microbatches.

    Tensors are joined that have a row per sample, or the same number of rows for each (tokens), or that differ in
    length only. So are lists with one entry per sample, or of unequal lengths. Scalars and tensors of one shape are
    averaged by size, and counts are added up: integers that differ, or are the rows, and tensors of one integer. Arrays
    of numpy are treated like tensors. Of anything else the first microbatch's value is returned.
    """
    if len(outputs) == 1:
        return outputs[0]
    first = outputs[0]
    if is_whole(first) and (isinstance(first, Tensor) or outputs == sizes != [1] * len(sizes) or len(set(outputs)) > 1):
        return sum(outputs)
    if has_row_count(first):
        return torch.cat(outputs)
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
    per_sample = isinstance(first, list) and all(map(_per_sample, outputs, sizes))
    if per_sample or (isinstance(first, list) and len(set(map(len, outputs))) > 1):
        return [item for out in outputs for item in out]
    if isinstance(first, dict) and any(out.keys() != first.keys() for out in outputs):  # a key for each class
        pairs = list(zip(outputs, sizes, strict=True))
        some = {key: [(out[key], size) for out, size in pairs if key in out] for out in outputs for key in out}
        return {key: join_outputs(*map(list, zip(*found, strict=True))) for key, found in some.items()}
    columns = zip(*(children(out) or [] for out in outputs), strict=True)
    return rebuild(first, [join_outputs(list(column), sizes) for column in columns])


def is_whole(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.ndim and not (value.is_floating_point() or value.is_complex() or value.dtype is torch.bool)
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _in_rows(outputs: list[Tensor], sizes: list[int]) -> bool:
    """Return True for rows of one tensor: a row for each sample, or a length that differs by microbatch."""
    if not outputs[0].ndim or len({out.shape[1:] if out.ndim else None for out in outputs}) > 1:
        return False
    lengths = [out.shape[0] for out in outputs]
    for_each = lengths[0] // sizes[0]
    if for_each and all(length == for_each * size for length, size in zip(lengths, sizes, strict=True)):
        return True
    if len(set(lengths)) > 1 or outputs[0].is_floating_point():
        return len(set(lengths)) > 1
    return any(
        type(out) is Tensor and not out.equal(outputs[0]) for out in outputs
    )  # tensors of a dry run have no values


def _per_sample(output: list[Any], size: int) -> bool:
    """Return True for a list with one entry per sample, rather than a few tensors with a row per sample."""
    rowwise = any(isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == size for leaf in output)
    return len(output) == size and not rowwise


def untrace(value: Any) -> Any:
    return map_leaves(lambda leaf: leaf.untraced() if hasattr(type(leaf), "untraced") else leaf, value)


def loss_of(output: Any) -> Tensor | None:
    """The loss in the output of a training step. Raises Lightning's own error for outputs that it refuses."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if output is not None and not isinstance(loss, Tensor):
        ClosureResult.from_training_step_output(output)
    return loss


def copies_of_computed(module: nn.Module) -> dict[int, Tensor]:
    """Copies without a graph, by identity, of the tensors with one on `module`: `weight_norm` makes such weights.

    `copy.deepcopy` refuses these tensors.
    """
    attributes = (value for part in module.modules() for value in vars(part).values())
    return {
        id(value): value.detach().clone() for value in attributes if isinstance(value, Tensor) and not value.is_leaf
    }
