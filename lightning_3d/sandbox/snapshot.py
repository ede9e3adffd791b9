"""Plain attributes that a pipelined step changes (`self.losses.append(loss)`, `self.average = ...`): as on one device.

Every microbatch, and every stage up to its cut, runs the user's code. So each run begins with the attributes as they
were before the step, and once all are done what the last stage's runs made of them is joined, like what the step
returns, and put on every rank. Objects of the user's own classes are left alone.

Buffers that code around the blocks changes (a queue of keys, a centre, a count): those of the last stage count.

That code runs on every stage, up to the stage's cut, so only the last one has run all of it. The others undo what they
did, and take what the last stage made of these buffers at the end of a step.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from operator import is_
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_3d.sandbox.counts import Counts, Path, Tally, exact, is_count
from lightning_3d.sandbox.lent import can_lend, lend, memory_of, write
from lightning_3d.sandbox.record import packed, unpacked
from lightning_3d.sandbox.trees import detached, form, join_outputs, untrace, weighted_mean

Changes = dict[Path, tuple[str, Any]]
"""What a run did where: "set" a value, "add" to an integer or "put" one there, "write" into a value, "append" or
"refill" with entries, "union", "count" more, "delete"."""
Snapshot = dict[Any, tuple[Any, Any]]
"""Values, with what is in them where that may change."""
_PLAIN = (
    int, float, complex, str, bytes, bool, type(None), np.generic, np.ndarray, Tensor, list, tuple, dict, set, deque
)  # fmt: skip
_LONG = 10_000
"""Entries of a container beyond which they are not copied and compared in each run."""
_MANY = 100
"""Entries of a list beyond which containers in it are data."""
_MISSING = object()


class Items(dict[int, tuple[Any, Any]]):
    """What is in a list or tuple that holds containers (`self.outputs = [[], []]`): a snapshot, by index."""

    @property
    def kept(self) -> list[Any]:
        return [value for value, _ in self.values()]


class Attributes:
    """The module's plain attributes at the start of a step.

    Args:
        counts: what is known of its integers; for who joins changes.
    """

    def __init__(self, module: Any, counts: Counts | None = None) -> None:
        self.module, self.counts = module, counts or Counts()
        self.before = _snapshot(_own(module))
        self.integers = set[Path]()
        """Those that the code that runs was lent."""
        self.places = list(_places(vars(module), self.before, (), cache(lambda: memory_of(module))))
        """Of what is written into, and the dicts that hold it."""

    @contextmanager
    def apart(self) -> Iterator[Changes]:
        """Gives what the code inside changes, once it is done; then it is as before."""
        changes: Changes = {}
        copies: dict[int, Any] = {}
        self.integers = {path for path in self.counts.changing if type(_at(self.before, path)) is int}
        for path in self.integers:
            self._holder(path)[path[-1]] = Tally.of(_at(self.before, path), path)
        loans = [(path, lend(holder, path[-1], copies)) for path, holder in self.places]
        try:
            yield changes
        finally:
            changes |= {path: ("write", loan.lent) for path, loan in loans if loan.end()}
            changes |= self.changes()
            for name in _own(self.module).keys() - self.before.keys():
                del self.module.__dict__[name]
            for name, (value, content) in self.before.items():
                self.module.__dict__[name] = value
                _put_back(value, content)

    def changes(self) -> Changes:
        """What is another than before."""
        found: Changes = {}
        for path, change in _differences(self.before, _own(self.module), ()):
            told: tuple[str, Any] | None = change
            if change[0] == "set":
                told = self.counts.told(path, _at(self.before, path), change[1], path in self.integers)
            if told is not None:
                found[path] = told
        return found

    def _holder(self, path: Path) -> Any:
        """The dict that has what is at `path`."""
        holder: Any = self.module.__dict__
        for key in path[:-1]:
            holder = holder[key]
        return holder

    def put(self, changes: Changes) -> None:
        """Make changes, in the lists and dicts that are there."""
        for path, (kind, sent) in changes.items():
            value = unpacked(sent)
            target = self._holder(path)
            if kind == "append":
                target[path[-1]].extend(value)
            elif kind in ("count", "union"):
                target[path[-1]].update(value)
            elif kind == "refill":
                target[path[-1]].clear()
                target[path[-1]].extend(value)
            elif kind == "add":
                target[path[-1]] += value
            elif kind == "delete":
                del target[path[-1]]
            elif kind == "write":
                write(target[path[-1]], value)
            else:
                target[path[-1]] = value


@cache
def _internals() -> frozenset[str]:
    names = vars(LightningModule()).keys() - {"training"}
    return frozenset({*names, "_hparams", "_hparams_initial", "_hparams_name", "_log_hyperparams"})


def own(module: Any) -> dict[str, Any]:
    """Its attributes, without those that Lightning and torch keep there."""
    return {name: value for name, value in vars(module).items() if name not in _internals()}


def _own(module: Any) -> dict[str, Any]:
    return {name: value for name, value in own(module).items() if isinstance(value, _PLAIN)}


def _snapshot(values: dict[Any, Any]) -> Snapshot:
    return {key: (value, _content(value)) for key, value in values.items()}


def _places(
    holder: Any, values: Snapshot, path: Path, shared: Callable[[], set[int]]
) -> Iterator[tuple[Path, dict[Any, Any]]]:
    for key, (value, content) in values.items():
        if isinstance(content, dict):
            yield from _places(value, content, (*path, key), shared)
        elif isinstance(holder, dict) and can_lend(value, shared):
            yield (*path, key), holder


def _content(value: Any) -> Any:
    """What is in a container; of a long list its length, and of other long ones nothing: they are data."""
    if _is_short(value) and any(isinstance(item, list | dict | set | deque) for item in value):
        return Items(_snapshot(dict(enumerate(value))))
    if not isinstance(value, list | dict | set | deque):
        return None
    if len(value) > _LONG:
        return len(value) if isinstance(value, list) else None
    return _snapshot(value) if isinstance(value, dict) else list(value)


def _is_short(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) <= _MANY


def _put_back(value: Any, content: Any) -> None:
    if isinstance(content, int):
        del value[content:]
    elif isinstance(content, Items):
        if isinstance(value, list):
            value[:] = content.kept
        for item, below in content.values():
            _put_back(item, below)
    elif isinstance(content, dict):
        for key in value.keys() - content.keys():
            del value[key]
        for key, (inner, below) in content.items():
            value[key] = inner
            _put_back(inner, below)
    elif content is not None and not _alike(value, content):
        value.clear()
        value.update(content) if isinstance(value, set) else value.extend(content)


def _alike(one: Collection[Any], other: Collection[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def _differences(before: Snapshot, now: dict[Any, Any], path: Path) -> Iterator[tuple[Path, tuple[str, Any]]]:
    for key in before.keys() - now.keys():
        yield (*path, key), ("delete", None)
    for key, value in now.items():
        kept, content = before.get(key, (_MISSING, None))
        if kept is not value:
            yield (*path, key), ("set", value)
        elif isinstance(value, Counter) and content is not None:
            if more := value - Counter({name: count for name, (count, _) in content.items()}):
                yield (*path, key), ("count", dict(more))
        elif isinstance(content, Items):
            first = value[: len(content)]
            if _alike(first, content.kept):
                yield from _differences(content, dict(enumerate(first)), (*path, key))
            if change := _change(value, content.kept):
                yield (*path, key), change
        elif isinstance(content, dict):
            yield from _differences(content, value, (*path, key))
        elif content is not None and (change := _change(value, content)):
            yield (*path, key), change


def _change(value: Any, content: Any) -> tuple[str, Any] | None:
    """What happened to a list, set or deque that is still the same object."""
    if isinstance(content, int):
        return ("append", value[content:]) if len(value) > content else None
    if isinstance(value, set):
        return ("union", value.difference(content)) if len(value) > len(content) else None
    if _alike(value, content):
        return None
    if isinstance(value, list) and _alike(value[: len(content)], content):
        return "append", value[len(content) :]
    return "refill", list(value)


def join_changes(runs: list[Changes], sizes: list[int], before: Snapshot, integers: Counts | None = None) -> Changes:
    """What one run on the whole batch, of microbatches of `sizes`, would have changed."""
    whole: Changes = {}
    integers = integers or Counts()
    paths = dict.fromkeys(path for run in runs for path in run)
    made_at = {path: _made(path, runs, sizes, _at(before, path)) for path in paths}
    counted = {path for path, (kind, values, _) in made_at.items() if _is_counted(kind, _at(before, path), values)}
    for path in counted:
        kind, values, _ = made_at[path]
        integers.look(kind, path, values, len(values) == len(runs))
    for path, (kind, values, counts) in made_at.items():
        if path in counted:
            whole[path] = kind, integers.joined(path, values)
        elif kind == "append":
            whole[path] = kind, _entries(values, counts)
        elif kind == "refill":
            whole[path] = kind, _in_turn(values, counts)
        elif kind == "count":
            whole[path] = kind, dict(sum(map(Counter, values), Counter()))
        elif kind == "union":
            whole[path] = kind, set[Any]().union(*values)
        elif kind == "write":
            whole[path] = kind, _written(_at(before, path), values, counts, everywhere=len(values) == len(runs))
        else:
            whole[path] = kind, _value(_at(before, path), values, counts, everywhere=len(values) == len(runs))
    return whole


def _made(path: Path, runs: list[Changes], sizes: list[int], before: Any) -> tuple[str, list[Any], list[int]]:
    """What was done there first, what runs made of it who did that, and their sizes."""
    done = [(*run[path], size) for run, size in zip(runs, sizes, strict=True) if path in run]
    kind = next((kind for kind, _, _ in done if kind in ("add", "put")), done[0][0])
    if kind in ("add", "put"):  # the first run to change an integer was not lent it
        done = [
            (kind, value - before if kind == "add" else value, size) if now == "set" and type(value) is int else
            (now, value, size)
            for now, value, size in done
        ]  # fmt: skip
    made = [(exact(detached(untrace(value))), size) for now, value, size in done if now == kind]
    return kind, [value for value, _ in made], [size for _, size in made]


def _is_counted(kind: str, before: Any, values: list[Any]) -> bool:
    """Whether it is known how integers came about: they were lent, or nothing was there before."""
    return kind in ("add", "put") or (kind == "set" and before is None and all(type(value) is int for value in values))


def sendable(changes: Changes) -> Changes:
    """Those that can be sent to other ranks, as they can be sent."""
    return {
        path: (kind, sent)
        for path, (kind, value) in changes.items()
        for sent in packed(f"training_step keeps in self.{path[0]} something", value)
    }


def _entries(tails: list[list[Any]], sizes: list[int]) -> list[Any]:
    """What the microbatches appended: an entry for each sample, or for the batch."""
    lengths = [len(tail) for tail in tails]
    if len(set(lengths)) > 1 or (lengths == sizes and lengths[0] > 1):
        return [entry for tail in tails for entry in tail]
    return _in_turn(tails, sizes)


def _in_turn(lists: list[list[Any]], sizes: list[int]) -> list[Any]:
    return [_value(None, list(entries), sizes) for entries in zip(*lists, strict=False)]


def _value(before: Any, values: list[Any], sizes: list[int], *, everywhere: bool = True) -> Any:
    """Counts are added up, but one that goes up by one everywhere counts batches; all else is joined like outputs."""
    if is_count(before) and all(map(is_count, values)):
        steps = [int(value - before) for value in values]
        once = set(steps) == {1} or not any(values)  # 0 again is the index of an epoch's first batch
        return values[0] if everywhere and once else before + sum(steps)
    if _is_table(before, values, sizes):
        return before + sum(value - before for value in values)
    if all(isinstance(item, np.ndarray) and item.dtype.kind in "iu" for item in (before, *values)):
        tables = [torch.as_tensor(item) for item in (before, *values)]
        if _is_table(tables[0], tables[1:], sizes):
            return np.asarray(_value(tables[0], tables[1:], sizes))
    if len({repr(form(value)) for value in values}) > 1 or len(set(map(type, values))) > 1:
        return values[0]
    return set[Any]().union(*values) if isinstance(values[0], set) else join_outputs(values, sizes)


def _written(before: Any, values: list[Any], sizes: list[int], *, everywhere: bool) -> Any:
    """As `_value`, for what was written into: no rows, since the shape is what it was. Counts are often kept as floats,
    and known by growing by whole numbers."""
    if isinstance(before, np.ndarray):
        before, *values = map(torch.as_tensor, (before, *values))
        return np.asarray(_written(before, values, sizes, everywhere=everywhere))
    if before.is_complex() or (before.is_floating_point() and not all(_is_more(before, value) for value in values)):
        return weighted_mean(values, [size / sum(sizes) for size in sizes])
    if before.dtype is torch.bool or not all(_is_more(before, value) for value in values):
        return values[0]
    steps = [value - before for value in values]
    once = everywhere and not before.ndim and all(step == 1 for step in steps)
    return values[0] if once else before + sum(steps)


def _is_more(before: Tensor, value: Tensor) -> bool:
    step = value.double() - before.double()
    return bool(((step >= 0) & (step == step.round())).all())


def _is_table(before: Any, values: list[Any], sizes: list[int]) -> bool:
    """Whether values are tensors of counts (a confusion matrix) that each microbatch has added to, not rows."""
    if not all(type(item) is Tensor and item.ndim and not item.is_floating_point() for item in (before, *values)):
        return False
    rows = all(len(value) == size for value, size in zip(values, sizes, strict=True))
    return not rows and all(value.shape == before.shape and bool((value >= before).all()) for value in values)


def _at(before: Snapshot, path: Path) -> Any:
    value, content = None, before
    for key in path:
        if not isinstance(content, dict) or key not in content:
            return None
        value, content = content[key]
    return value


Mark = tuple[int, int]


def open_buffers(module: nn.Module, units: Sequence[str]) -> list[str]:
    """Names of the buffers that belong to no unit."""
    inside = tuple(f"{unit}." for unit in units)
    return [name for name, _ in module.named_buffers() if not name.startswith(inside)]


def marks(module: nn.Module, names: Sequence[str]) -> dict[str, Mark]:
    """What changes when a buffer is replaced, or changed in place."""
    found = dict(module.named_buffers())
    return {name: (id(found[name]), found[name]._version) for name in names if name in found}


def changed(module: nn.Module, before: Mapping[str, Mark]) -> tuple[str, ...]:
    """Names of those that were."""
    now = marks(module, list(before))
    return tuple(name for name, mark in before.items() if now.get(name) != mark)


@contextmanager
def undone(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Let what runs inside change copies of these buffers; the buffers themselves are back at the end.

    They are not written to: a backward may still need the values that the copies had.
    """
    held = [(owner, leaf, owner._buffers[leaf]) for owner, leaf in (_place(module, name) for name in names)]
    copies = {id(buffer): buffer.detach().clone() for _, _, buffer in held if buffer is not None}
    for owner, leaf, buffer in held:
        owner._buffers[leaf] = None if buffer is None else copies[id(buffer)]
    try:
        yield
    finally:
        for owner, leaf, buffer in held:
            owner._buffers[leaf] = buffer


@torch.no_grad()
def put(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Give buffers these values, in place where they fit."""
    for name, value in values.items():
        owner, leaf = _place(module, name)
        buffer = owner._buffers[leaf]
        if buffer is not None and buffer.shape == value.shape:
            buffer.copy_(value)
        else:
            owner._buffers[leaf] = value.clone()


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf
