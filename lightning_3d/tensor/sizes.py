"""Which numbers a block's code reads, and which of them may have to shrink with the shard."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

from torch import nn

from lightning_3d.tensor.tensor_plan import Attribute

MOST = 600
"""Combinations of attributes that are tried for one region."""
Ways = Sequence[tuple[tuple[int, int], ...]]


@contextmanager
def watch_reads(module: nn.Module) -> Iterator[dict[Attribute, Any]]:
    """Collect the plain values that `module`'s code reads from its modules while this is open."""
    found: dict[Attribute, Any] = {}
    watched: list[tuple[Any, type]] = []
    settings: dict[int, tuple[Any, list[Attribute]]] = {}
    for name, child in module.named_modules():
        for key, held in child.__dict__.items():
            if _is_settings(key, held):
                settings.setdefault(id(held), (held, []))[1].append((name, key))
        _watch(child, [(name, "")], found, watched)
    for held, places in settings.values():
        # Many modules may hold one configuration: any of them may be the reader.
        _watch(held, [(name, f"{key}.") for name, key in places], found, watched)
    try:
        yield found
    finally:
        for owner, kind in watched:
            object.__setattr__(owner, "__class__", kind)


def combinations(
    read: Mapping[Attribute, Any], ways: Ways, forced: Mapping[Attribute, Any]
) -> Iterator[dict[Attribute, Any]]:
    """Changes to try, those that change least first. Each is attribute -> value on each rank."""
    options = {key: _shrunk(value, ways) for key, value in read.items() if key not in forced and _is_number(value)}
    options = {key: values for key, values in options.items() if values}
    tried = 0
    for count in range(len(options) + 1):
        for chosen in itertools.combinations(options, count):
            for values in itertools.product(*(options[key] for key in chosen)):
                if tried == MOST:
                    return
                tried += 1
                yield {**forced, **dict(zip(chosen, values, strict=True))}


def _shrunk(value: Any, ways: Ways) -> list[tuple[Any, ...]]:
    """`value` in proportion to each way of dividing, and to one way over another, where that gives whole numbers."""
    factors = [[Fraction(part, whole) for part, whole in way] for way in ways]
    factors += [[a / b for a, b in zip(x, y, strict=True)] for x in factors for y in factors if x != y]
    found = []
    for way in factors:
        scaled = [_scale(value, factor) for factor in way]
        if None not in scaled and any(item != value for item in scaled) and tuple(scaled) not in found:
            found.append(tuple(scaled))
    return found


def _scale(value: Any, factor: Fraction) -> Any:
    if isinstance(value, int):
        scaled = value * factor
        return int(scaled) if scaled.denominator == 1 and scaled >= 1 else None
    items = [_scale(item, factor) for item in value]
    return None if None in items else type(value)(items)


def _watch(
    owner: Any, places: Sequence[Attribute], found: dict[Attribute, Any], watched: list[tuple[Any, type]]
) -> None:
    kind = type(owner)

    def read(self: Any, name: str) -> Any:
        value: Any = kind.__getattribute__(self, name)  # type: ignore[call-arg]
        if name != "training" and not name.startswith("__") and _is_plain(value):
            for module, prefix in places:
                found.setdefault((module, prefix + name), value)
        return value

    try:
        object.__setattr__(
            owner, "__class__", type(kind.__name__, (kind,), {"__getattribute__": read, "__slots__": ()})
        )
    except TypeError:
        return  # A class with a layout of its own cannot be watched; nothing it holds is then a candidate.
    watched.append((owner, kind))


def _is_settings(key: str, held: Any) -> bool:
    plain = not isinstance(held, nn.Module | type | int | float | str | bool | dict | list | tuple | set | None)
    return plain and not key.startswith("_") and not callable(held) and bool(getattr(held, "__dict__", None))


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str | None) or _is_number(value)


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return value > 1
    return type(value) in (tuple, list) and len(value) > 0 and all(type(item) is int and item > 1 for item in value)
