"""Records of what a step logs and of its calls of metrics; one record from those of all microbatches.

Calls are matched by method, name and number of earlier calls. Their position does not matter, because a call that
depends on the data ("if mask.any(): self.log(...)") does not happen on every microbatch.

Objects of any kind are pickled on their way from the last stage, which runs a step to its end, to the other ranks.
"""

import pickle
import warnings
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_3d.ranks import talk
from lightning_3d.sandbox.trees import form, leaves, map_leaves, weighted_mean

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


@dataclass(frozen=True)
class MetricName:
    """Stands for a metric of the module in a record."""

    name: str


@dataclass(frozen=True)
class Computed:
    """Stands for the result of a call of a metric, or an entry of it."""

    key: str
    """Of the call."""
    path: tuple[Hashable, ...]
    value: Any
    """On the microbatch. None in the record of the full batch: replaying the call gives it."""


@dataclass(frozen=True)
class RecordedCall:
    """A call of `self.log` or `self.print`, of a method of a metric, or of a logger."""

    what: str
    """"log", "print", "forward", "update", "reset", "compute", or "logger"."""
    name: str
    """Of the logged value or of the metric; of a logger, the route to the function."""
    key: str
    """Identifies the call in the step, equally on every microbatch."""
    pieces: tuple[Arguments | None, ...]
    """The arguments on each microbatch, None for one without the call; one entry for logs and prints."""


@dataclass
class Record:
    calls: list[RecordedCall] = field(default_factory=list)

    def add(self, what: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RecordedCall:
        before = sum(call.what == what and call.name == name for call in self.calls)
        self.calls.append(RecordedCall(what, name, f"{what} {name} {before}", ((args, kwargs),)))
        return self.calls[-1]


def logged_numbers(record: Record) -> Record:
    """The calls that log a number that is no result of a metric, with what decides how they are joined."""
    found = Record()
    for call in record.calls:
        args, given = call.pieces[0] or ((), {})
        number = args[0] if call.what == "log" and args else None
        if isinstance(number, int | float) or (isinstance(number, Tensor) and number.numel() == 1):
            how = given.get("reduce_fx", "mean")
            kwargs = {"batch_size": given.get("batch_size"), "reduce_fx": getattr(how, "__name__", how)}
            found.calls.append(replace(call, pieces=(((float(number),), kwargs),)))
    return found


def number_in(call: RecordedCall) -> float:
    assert call.pieces[0] is not None
    return float(call.pieces[0][0][0])


def combine(records: list[Record], sizes: list[int]) -> Record:
    """One record from those of the microbatches.

    `reduce_fx` decides about logged values: a mean, a sum or an extreme over the microbatches that logged them. The
    weights of a mean are the sizes, or the `batch_size` of the calls. Metrics keep the arguments of every microbatch.
    """
    made = [{call.key: call for call in record.calls} for record in records]
    combined = Record()
    for key in _order(records):
        calls = [of_one.get(key) for of_one in made]
        first = next(call for call in calls if call is not None)
        if first.what in _ONCE:
            logged = [(call.pieces[0], size) for call, size in zip(calls, sizes, strict=True) if call is not None]
            once = _ONCE[first.what]([piece for piece, _ in logged], [size for _, size in logged])
            what = f"training_step calls {first.name} with something"
            pieces: tuple[Any, ...] = (once,) if first.what == "log" else packed(what, once)
        else:
            pieces = tuple(None if call is None else call.pieces[0] for call in calls)
        combined.calls.append(replace(first, pieces=pieces))
    logged_keys = {part.key for call in combined.calls if call.what == "log" for part in _computed(call.pieces)}
    # other ranks need no computed value that is not logged, and computing costs (and gathers)
    combined.calls = [call for call in combined.calls if call.what != "compute" or call.key in logged_keys]
    return combined


def _order(records: list[Record]) -> list[str]:
    """Keys of all calls in order; a key that is new in a microbatch follows its predecessor there."""
    order: list[str] = []
    for record in records:
        at = 0
        for call in record.calls:
            if at < len(order) and order[at] == call.key:
                at += 1
            elif call.key in order:
                at = max(at, order.index(call.key) + 1)
            else:
                order.insert(at, call.key)
                at += 1
    return order


def _logged_once(pieces: list[Any], sizes: list[int]) -> Arguments:
    _, kwargs = pieces[0]
    given = [each.get("batch_size") for _, each in pieces]
    if None not in given:
        kwargs = kwargs | {"batch_size": sum(given)}
        if len(set(given)) > 1 or 1 < given[0] <= max(sizes):  # else it counts nothing, or the rows of the full batch
            sizes = given
    return (_combine([args[0] for args, _ in pieces], sizes, kwargs.get("reduce_fx", "mean")),), kwargs


def _said_once(pieces: list[Any], sizes: list[int]) -> Any:
    """Arguments for a logger or a print: numbers are averaged, other values are those of the first microbatch."""
    like = form(pieces[0])
    alike = [(leaves(piece), size) for piece, size in zip(pieces, sizes, strict=True) if form(piece) == like]
    sizes, columns = [size for _, size in alike], zip(*(items for items, _ in alike), strict=True)
    return map_leaves(lambda _: _averaged(next(columns), sizes), pieces[0])


def _averaged(values: tuple[Any, ...], sizes: list[int]) -> Any:
    first = values[0]
    is_number = isinstance(first, float) or (isinstance(first, Tensor) and not first.ndim and first.is_floating_point())
    return mean_of(list(values), sizes) if is_number and len({type(value) for value in values}) == 1 else first


def _combine(values: list[Any], sizes: list[int], reduce_fx: Any) -> Any:
    first = values[0]
    if isinstance(first, Computed) and len({(v.key, v.path) if isinstance(v, Computed) else None for v in values}) == 1:
        return replace(first, value=None)
    values = [value.value if isinstance(value, Computed) else value for value in values]
    first = values[0]
    if isinstance(first, dict):
        return {key: _combine([value[key] for value in values], sizes, reduce_fx) for key in first}
    if not isinstance(first, Tensor | float | int) or len(values) == 1:
        return first
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    if name in ("sum", "max", "min"):
        stacked = torch.stack([torch.as_tensor(value) for value in values])
        return stacked.sum(0) if name == "sum" else getattr(stacked, f"a{name}")()
    return mean_of(values, sizes)


_ONCE = {"log": _logged_once, "logger": _said_once, "print": _said_once}


def mean_of(values: list[Any], sizes: list[int]) -> Any:
    """Mean of numbers by size. One of size 0 does not count: the mean over no token is not a number."""
    total = sum(sizes)
    counted = [(value, size / total) for value, size in zip(values, sizes, strict=True) if size] if total else []
    counted = counted or [(value, 1 / len(values)) for value in values]
    numbers = [value.float() if isinstance(value, Tensor) and not value.is_floating_point() else value
               for value, _ in counted]  # fmt: skip
    return weighted_mean(numbers, [weight for _, weight in counted])


def _computed(value: Any) -> list[Computed]:
    if isinstance(value, Computed):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [part for item in value for part in _computed(item)] if isinstance(value, list | tuple) else []


_SENT = (Tensor, str, bytes, int, float, complex, bool, type(None))


class PickledObject(bytes):
    """An object (a figure, an image of a logger's own kind), pickled."""


def packed(what: str, value: Any) -> tuple[Any, ...]:
    """`value` in a form that can be sent; nothing, and a warning, where there is none."""
    try:
        return (map_leaves(lambda leaf: leaf if isinstance(leaf, _SENT) else PickledObject(talk.pickled(leaf)), value),)
    except Exception as error:  # any failure to pickle means the same: it is not sent
        warnings.warn(
            f"{what} that cannot be sent to other ranks ({type(error).__name__}: {error}). Under a pipeline only the"
            " last stage has it, and loggers are on rank 0: it is left out. Do that in on_train_batch_end.",
            stacklevel=2,
        )
        return ()


def unpacked(arguments: Any) -> Any:
    return map_leaves(lambda leaf: pickle.loads(leaf) if isinstance(leaf, PickledObject) else leaf, arguments)
