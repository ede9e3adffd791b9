"""Everything of a checkpoint that is not a tensor, as JSON: reading it builds plain values and runs no code.

Tensors are stored elsewhere, under a name. Other kinds of values are written as {"!": kind, "v": value}.
"""

import base64
import json
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from enum import Enum
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from lightning_3d.errors import CheckpointError

MARK = "!"
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
Keep = Callable[[Any, str], str]
"""Puts away a tensor, or an object with no plain form, found at a place; returns the name to find it under."""
Find = Callable[[str, str], Any]
"""From its kind ("tensor" or "object") and name."""


def dumps(value: Any, keep: Keep, what: str) -> bytes:
    return json.dumps(_encode(value, keep, what), separators=(",", ":")).encode()


def loads(text: bytes, find: Find, what: str) -> Any:
    try:
        return _decode(parse(text, what), find, what)
    except RecursionError:
        raise CheckpointError(f"{what} is nested too deeply to be what a Trainer saved.") from None


def parse(text: bytes, what: str) -> Any:
    """JSON, whatever is wrong with it as a CheckpointError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not the JSON it should be ({error}): the checkpoint is damaged.") from None


def _encode(value: Any, keep: Keep, at: str) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_encode(item, keep, f"{at}[{index}]") for index, item in enumerate(value)]
    if type(value) is dict and MARK not in value and all(type(key) is str for key in value):
        return {key: _encode(item, keep, f"{at}.{key}") for key, item in value.items()}
    if isinstance(value, Tensor):
        return {MARK: "tensor", "v": keep(value, at)}
    for kind, (accepts, take_apart, _) in KINDS.items():
        if accepts(value):
            return {MARK: kind, "v": _encode(take_apart(value), keep, at)}
    return {MARK: "object", "v": keep(value, at)}


def _decode(value: Any, find: Find, what: str) -> Any:
    if isinstance(value, list):
        return [_decode(item, find, what) for item in value]
    if not isinstance(value, dict):
        return value
    if MARK not in value:
        return {key: _decode(item, find, what) for key, item in value.items()}
    kind: Any = value[MARK]
    content: Any = value.get("v")
    try:
        if kind in ("tensor", "object"):
            return find(kind, content)
        return KINDS[kind][2](_decode(content, find, what))
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise CheckpointError(
            f"{what} contains {str(kind)[:40]!r}, no plain value ({error!r:.80}): it is damaged or of a newer version."
        ) from None


def _items(value: Mapping[Any, Any]) -> list[list[Any]]:
    return [[key, item] for key, item in value.items()]


def _pairs(items: Iterable[Any]) -> list[tuple[Any, Any]]:
    return [(key, item) for key, item in items]


def _is_numpy(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in "biuf"


def _numpy(parts: list[Any]) -> Any:
    import numpy

    dtype, shape, raw = parts
    if not (isinstance(dtype, str) and len(dtype) < 8 and dtype.lstrip("<>=|")[:1] in tuple("biuf")):
        raise ValueError(f"no plain numpy type: {dtype!r:.20}")
    array = numpy.frombuffer(raw, dtype=dtype).reshape(tuple(shape)).copy()
    return array if shape else array[()]


Kind = tuple[Callable[[Any], bool], Callable[[Any], Any], Callable[[Any], Any]]
"""The test for a kind of value, and the functions that encode and decode it."""
KINDS: dict[str, Kind] = {
    "tuple": (lambda v: isinstance(v, tuple) and not isinstance(v, torch.Size), list, tuple),
    "size": (lambda v: isinstance(v, torch.Size), list, torch.Size),
    "ordered": (lambda v: type(v) is OrderedDict, _items, lambda items: OrderedDict(_pairs(items))),
    "dict": (lambda v: type(v) in (dict, defaultdict), _items, lambda items: dict(_pairs(items))),
    "set": (lambda v: type(v) in (set, frozenset), lambda v: sorted(v, key=repr), set),
    "deque": (lambda v: type(v) is deque, lambda v: [list(v), v.maxlen], lambda v: deque(v[0], v[1])),
    "bytes": (
        lambda v: type(v) in (bytes, bytearray),
        lambda v: base64.b64encode(v).decode(),
        lambda v: base64.b64decode(v, validate=True),
    ),
    "complex": (lambda v: type(v) is complex, lambda v: [v.real, v.imag], lambda v: complex(*v)),
    "dtype": (lambda v: isinstance(v, torch.dtype), str, lambda v: _DTYPES[v]),
    "device": (lambda v: isinstance(v, torch.device), str, lambda v: v),
    "path": (lambda v: isinstance(v, PurePath), str, str),
    "timedelta": (
        lambda v: type(v) is timedelta,
        lambda v: [v.days, v.seconds, v.microseconds],
        lambda v: timedelta(*v),
    ),
    "numpy": (_is_numpy, lambda v: [v.dtype.str, list(v.shape), v.tobytes()], _numpy),
    # of a class of one's own only the plain value survives: bringing the class back would mean importing it
    "plain": (
        lambda v: isinstance(v, Enum | str | int | float) and type(v) not in (bool, int, float, str),
        lambda v: v.value if isinstance(v, Enum) else next(k(v) for k in (str, int, float) if isinstance(v, k)),
        lambda v: v,
    ),
    "mapping": (lambda v: isinstance(v, dict), _items, lambda items: dict(_pairs(items))),
}
