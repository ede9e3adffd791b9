"""Numbers that a block's code reads, and those that may have to shrink with the shard."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

from torch import nn

from lightning_3d.tensor.tensor_plan import Attribute

MOST = 200
"""Most combinations of attributes that are tried for one candidate. Right ones come early: the latest that is known,
for a Mamba mixer with four numbers to shrink, is number 149."""
Ways = Sequence[tuple[tuple[int, int], ...]]


@contextmanager
def watch_reads(module: nn.Module) -> Iterator[dict[Attribute, Any]]:
    """Collect the plain values that `module`'s code reads from its modules."""
    found: dict[Attribute, Any] = {}
    watched: list[tuple[Any, type]] = []
    settings: dict[int, tuple[Any, list[Attribute]]] = {}
    for name, child in module.named_modules():
        for key, value in child.__dict__.items():
            if _is_settings(key, value):
                settings.setdefault(id(value), (value, []))[1].append((name, key))
        _watch(child, [(name, "")], found, watched)
    for config, places in settings.values():
        # Many modules may share one configuration: any of them may be the reader.
        _watch(config, [(name, f"{key}.") for name, key in places], found, watched)
    try:
        yield found
    finally:
        for owner, kind in watched:
            object.__setattr__(owner, "__class__", kind)


def combinations(
    read: Mapping[Attribute, Any], ways: Ways, forced: Mapping[Attribute, Any]
) -> Iterator[dict[Attribute, Any]]:
    """Changes to try, the smallest first. Each maps an attribute to its value on each rank."""
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
    """`value` scaled by each split, and by the ratio of two, where that gives integers."""
    factors = [[Fraction(local, full) for local, full in way] for way in ways]
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
        asked = name != "training" and not name.startswith("__")
        if asked and (isinstance(value, int | float | str | None) or _is_number(value)):
            for module, prefix in places:
                found.setdefault((module, prefix + name), value)
        return value

    try:
        object.__setattr__(
            owner, "__class__", type(kind.__name__, (kind,), {"__getattribute__": read, "__slots__": ()})
        )
    except TypeError:
        return  # a class with a layout of its own cannot be watched, so its values are no candidates
    watched.append((owner, kind))


def _is_settings(key: str, value: Any) -> bool:
    plain = not isinstance(value, nn.Module | type | int | float | str | bool | dict | list | tuple | set | None)
    return plain and not key.startswith("_") and not callable(value) and bool(getattr(value, "__dict__", None))


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return value > 1
    return type(value) in (tuple, list) and len(value) > 0 and all(type(item) is int and item > 1 for item in value)
