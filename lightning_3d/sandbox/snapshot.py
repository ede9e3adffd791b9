"""Plain attributes and buffers that a step changes: isolated for one run of it, and put back.

A pipeline runs the user's `training_step` once for each microbatch, on every stage up to its cut. So each run works on
copies of the module's plain attributes (`self.losses.append(loss)`, `self.average = ...`) as they were before the
batch. `joining` makes one change from those of the last stage's runs, and every rank applies it. Objects of the user's
own classes are not copied.

Buffers that code outside of the blocks changes (a queue of keys, a centre, a count): only the last stage runs all of
that code. The others undo their changes and get the last stage's values at the end of the step.
"""

import copy
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from operator import is_
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_3d.launch.lightning_private import HPARAMS
from lightning_3d.module.anatomy import place_of
from lightning_3d.module.torch_private import own_buffers, version_of
from lightning_3d.module.undo import replaced_entries
from lightning_3d.sandbox.fingerprint import digest
from lightning_3d.sandbox.record import packed, unpacked

Path = tuple[Any, ...]
"""The name of an attribute, then keys of dicts and indices of lists in it."""
Changes = dict[Path, tuple[str, Any]]
"""The action of a run at a path.

It may "set" another value, "delete" it, "append" entries to a list, "refill" a container, or "write" into a tensor.
"""
_PLAIN = (
    int, float, complex, str, bytes, bool, type(None), np.generic, np.ndarray, Tensor, list, tuple, dict, set, deque
)  # fmt: skip
_LONG = 10_000
"""Entries of a container beyond which it is not copied for each run: only what is appended to a list is undone."""
_MANY = 100
"""Entries of a list beyond which what is in them is not copied."""
_LARGE = 1_000_000
"""Elements of a tensor or array beyond which it is data, which is not copied."""
_MISSING = object()


@cache
def _internals() -> frozenset[str]:
    names = vars(LightningModule()).keys() - {"training"}
    return frozenset({*names, *HPARAMS})


def own(module: Any) -> dict[str, Any]:
    """The attributes of a module, class, file or another object, without those of Lightning, torch and Python."""
    hidden = {*_internals(), *(name for name in vars(module) if name[:2] == name[-2:] == "__")}
    return {name: value for name, value in vars(module).items() if name not in hidden}


def is_plain(value: Any) -> bool:
    """True for numbers, texts, tensors, arrays and containers."""
    return isinstance(value, _PLAIN)


def plain_attributes(module: Any) -> dict[str, Any]:
    return {name: value for name, value in own(module).items() if is_plain(value)}


class Copies:
    """Copies of plain values. A value that stands at several places has one copy.

    Not copied are the entries of a dict of more than `most`, and tensors and arrays of more than `largest` elements.
    """

    def __init__(self, most: int = _LONG, largest: float = _LARGE) -> None:
        self.most, self.largest = most, largest
        self.pairs: dict[int, tuple[Any, Any]] = {}
        """By the id of an original: it and its copy."""
        self.lengths: dict[int, tuple[list[Any], int]] = {}
        """Lists that are too long to be copied, by id, with their lengths."""

    def of(self, value: Any) -> Any:
        if id(value) in self.pairs:
            return self.pairs[id(value)][1]
        if isinstance(value, tuple):
            return self._tuple(value)
        if isinstance(value, list) and len(value) > _LONG:
            self.lengths[id(value)] = value, len(value)
        if not _is_copied(value, self.largest):
            return value
        try:
            duplicate = value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
        except Exception:  # its class has a constructor of its own (torchphysics: a Counter with a name and a size)
            return value
        if isinstance(duplicate, dict) and duplicate.keys() != value.keys():
            return value  # a registry that renames its keys (transformers has one) is an object of a class of its own
        self.pairs[id(value)] = value, duplicate
        for key, item in _entries(duplicate, self.most):
            duplicate[key] = self.of(item)
        return duplicate

    def _tuple(self, value: tuple[Any, ...]) -> Any:
        named = hasattr(value, "_make")
        if not (type(value) is tuple or named) or len(value) > _MANY:
            return value
        items = [self.of(item) for item in value]
        if all(map(is_, items, value)):
            return value
        duplicate = value._make(items) if named else tuple(items)  # type: ignore[attr-defined]
        self.pairs[id(value)] = value, duplicate
        return duplicate


def _is_copied(value: Any, largest: float) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc" and value.size <= largest
    if isinstance(value, Tensor):
        return type(value) is Tensor and not value.requires_grad and value.numel() <= largest
    return isinstance(value, list | dict | set | deque) and len(value) <= _LONG


def _entries(container: Any, most: int) -> list[tuple[Any, Any]]:
    """Keys and values of a container whose entries are copied too."""
    if isinstance(container, dict):
        return list(container.items()) if len(container) <= most else []
    return list(enumerate(container)) if isinstance(container, list | deque) and len(container) <= _MANY else []


@contextmanager
def on_copies(holder: Any, copies: Copies) -> Iterator[None]:
    """Let the code inside work on copies of the plain attributes of an object; the originals are back at the end.

    The originals are not written to: a backward may still need values of the copies.
    """
    before = plain_attributes(holder)
    vars(holder).update({name: copies.of(value) for name, value in before.items()})
    try:
        yield
    finally:
        for name in plain_attributes(holder).keys() - before.keys():
            del vars(holder)[name]
        vars(holder).update(before)
        for value, length in copies.lengths.values():
            del value[length:]


@contextmanager
def isolated(module: Any) -> Iterator[Changes]:
    """Let the code inside work on copies of the plain attributes; yields what it changes, once it is done."""
    copies, changes, before = Copies(), Changes(), plain_attributes(module)
    with on_copies(module, copies):
        try:
            yield changes
        finally:
            known = {id(duplicate): (original, 0) for original, duplicate in copies.pairs.values()}
            changes |= _Differences(known, copies).between(before, plain_attributes(module), ())


class Watched:
    """Values that a module or another object keeps now, by name as `kept` returns them, for later comparison."""

    def __init__(self, module: Any, kept: Callable[[Any], dict[str, Any]] = plain_attributes) -> None:
        self.module, self.kept, self.copies = module, kept, Copies()
        self.before = {name: self.copies.of(value) for name, value in kept(module).items()}
        self.known = {
            key: (duplicate, _version(original) if isinstance(original, Tensor) else 0)
            for key, (original, duplicate) in self.copies.pairs.items()
        }

    def changes(self) -> Changes:
        return dict(_Differences(self.known, self.copies).between(self.before, self.kept(self.module), ()))


class _Differences:
    """Compares plain values with earlier ones: `known` has what stands for each, by its id, and the version then."""

    def __init__(self, known: Mapping[int, tuple[Any, int]], copies: Copies) -> None:
        self.known, self.copies = known, copies
        self.inside = set[int]()
        """Containers that were compared: one may contain itself, as the ring of a cache does."""

    def between(self, before: dict[Any, Any], now: dict[Any, Any], path: Path) -> Changes:
        before, now = dict(before), dict(now)  # of classes whose methods may do other things
        changes: Changes = {(*path, key): ("delete", None) for key in before.keys() - now.keys()}
        for key, value in now.items():
            changes |= self._difference(before.get(key, _MISSING), value, (*path, key))
        return changes

    def _difference(self, before: Any, now: Any, path: Path) -> Changes:
        if now is before:
            _, length = self.copies.lengths.get(id(now), (None, None))
            return {path: ("append", now[length:])} if length is not None and len(now) > length else {}
        if not self._stands_for(now, before):
            return {path: ("set", self._resolved(now))}
        if isinstance(now, Tensor | np.ndarray):
            return {} if self._is_unchanged(now) else {path: ("write", now)}
        if id(now) in self.inside:
            return {}
        self.inside.add(id(now))
        if isinstance(now, list | tuple):
            return self._in_list(before, now, path)
        if isinstance(now, dict) and not isinstance(now, Counter):
            return self.between(before, now, path)
        if isinstance(now, deque):
            same = len(now) == len(before) and all(map(self._stands_for, now, before))
            return {} if same else {path: ("refill", list(map(self._resolved, now)))}
        return {} if now == before else {path: ("refill", now)}

    def _in_list(self, before: Any, now: Any, path: Path) -> Changes:
        if not (len(now) >= len(before) and all(map(is_, now[: len(before)], before))) and not (
            len(now) >= len(before) and all(self._stands_for(item, old) for item, old in zip(now, before, strict=False))
        ):
            return {path: ("refill", list(map(self._resolved, now)))}
        changes: Changes = {}
        if len(before) <= _MANY:
            for index, old in enumerate(before):
                changes |= self._difference(old, now[index], (*path, index))
        if len(now) > len(before):
            changes[path] = "append", list(map(self._resolved, now[len(before) :]))
        return changes

    def _stands_for(self, now: Any, before: Any) -> bool:
        return now is before or (id(now) in self.known and self.known[id(now)][0] is before)

    def _is_unchanged(self, value: Any) -> bool:
        before, version = self.known[id(value)]
        if isinstance(value, np.ndarray):
            return bool(value.tobytes() == before.tobytes())
        return _version(value) == version

    def _resolved(self, value: Any) -> Any:
        """The original of a copy that was moved to another place and is unchanged."""
        moved = isinstance(value, Tensor | np.ndarray) and id(value) in self.known and self._is_unchanged(value)
        return self.known[id(value)][0] if moved else value


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else version_of(tensor)  # one of inference mode counts no changes


def put_changes(module: Any, changes: Changes) -> None:
    """Apply changes to a module, in place where a container or tensor stays the same one."""
    for path, (kind, sent) in changes.items():
        holder: Any = vars(module)
        for key in path[:-1]:
            holder = holder[key]
        value = unpacked(sent)
        if kind == "delete":
            del holder[path[-1]]
        elif kind == "append":
            holder[path[-1]].extend(value)
        elif kind == "refill":
            target = holder[path[-1]]
            target.clear()
            target.update(value) if isinstance(target, set | Counter) else target.extend(value)
        elif kind == "write":
            with torch.no_grad():
                holder[path[-1]][...] = value
        else:
            holder[path[-1]] = value


def sendable(changes: Changes) -> Changes:
    """Those that can be sent to other ranks, pickled where they must be."""
    return {
        path: (kind, sent)
        for path, (kind, value) in changes.items()
        for sent in packed(f"training_step keeps in self.{path[0]} something", value)
    }


Mark = tuple[int, int, int]
"""The identity of a buffer, its version, and a digest of its values: torch counts no write through `.data`.

Statistics of norms have none: they are documented to be those of microbatches.
"""
_PRINTED = 1 << 24
"""Elements of a buffer of numbers beyond which its values are not compared."""


def open_buffers(module: nn.Module, units: Sequence[str]) -> list[str]:
    """Names of the buffers that belong to no unit."""
    inside = tuple(f"{unit}." for unit in units)
    return [name for name, _ in module.named_buffers() if not name.startswith(inside)]


def marks(module: nn.Module, names: Sequence[str]) -> dict[str, Mark]:
    """Marks of buffers, which differ once one is replaced or changed in place. Their values are read."""
    buffers = dict(module.named_buffers())
    return {name: _mark(buffers[name], place_of(module, name)[0]) for name in names if name in buffers}


def _mark(buffer: Tensor, owner: nn.Module) -> Mark:
    most = 0 if buffer.is_meta else _PRINTED if buffer.is_floating_point() else _LARGE
    plain = type(buffer) is Tensor and not (buffer.is_quantized or buffer.is_nested)
    plain = plain and not keeps_statistics(owner)
    return id(buffer), _version(buffer), digest(buffer) if plain and buffer.numel() <= most else 0


def keeps_statistics(part: nn.Module) -> bool:
    """True for a norm that keeps the mean and variance of its samples. They are no state that a step computes with."""
    return hasattr(part, "track_running_stats")


def changed(module: nn.Module, before: Mapping[str, Mark]) -> tuple[str, ...]:
    """Names of the buffers whose marks differ now."""
    now = marks(module, list(before))
    return tuple(name for name, mark in before.items() if now.get(name) != mark)


def isolated_buffers(module: nn.Module, names: Sequence[str]) -> AbstractContextManager[None]:
    """Let the code inside change copies of these buffers; the buffers themselves are back at the end.

    They are not written to: a backward may still need values of the copies.
    """
    owners = (place_of(module, name) for name in names)
    places = [(own_buffers(owner), leaf, own_buffers(owner)[leaf]) for owner, leaf in owners]
    copies = {id(buffer): None if buffer is None else buffer.detach().clone() for _, _, buffer in places}
    return replaced_entries((buffers, leaf, copies[id(buffer)]) for buffers, leaf, buffer in places)


@torch.no_grad()
def put_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give buffers these values, in place where the shapes agree."""
    for name, value in values.items():
        owner, leaf = place_of(module, name)
        buffer = own_buffers(owner)[leaf]
        if buffer is not None and buffer.shape == value.shape:
            buffer.copy_(value)
        else:
            own_buffers(owner)[leaf] = value.clone()
