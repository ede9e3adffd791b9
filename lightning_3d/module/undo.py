"""`UndoStack`: puts back what a run changes in the user's module, in torch and in Lightning."""

import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn


class ABSENT:
    """Marks an attribute that did not exist. A class, because a deep copy keeps its identity."""


def do_nothing(*_: Any, **__: Any) -> None:
    """Take the place of a function that must not run."""


class Change:
    """A new value for an own attribute of a class or an object, past `nn.Module.__setattr__`."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self.owner, self.name = owner, name
        self.before = self.now()
        self.put(value)

    def revert(self) -> None:
        self.put(self.before)

    def put(self, value: Any) -> None:
        if isinstance(self.owner, type):
            delattr(self.owner, self.name) if value is ABSENT else setattr(self.owner, self.name, value)
        elif value is ABSENT:
            vars(self.owner).pop(self.name, None)
        else:
            vars(self.owner)[self.name] = value

    def now(self) -> Any:
        return vars(self.owner).get(self.name, ABSENT)


class UndoStack(ExitStack):
    """Callbacks that undo changes, the last change first. A copy, also in another process, is empty."""

    alone = False
    """True once other ranks do not answer any more."""

    def __reduce__(self) -> Any:
        return UndoStack, ()

    def set(self, owner: Any, name: str, value: Any) -> Change:
        """Set an own attribute of a class or an object, past `nn.Module.__setattr__`."""
        change = Change(owner, name, value)
        self.callback(change.revert)
        return change

    def replace(self, function: Any, other: Any, modules: Iterable[nn.Module]) -> None:
        """Put `other` in the place of a function of torch, also where `modules` or their code name it otherwise."""
        parts = [child for module in modules for child in module.modules()]
        kinds = {kind for child in parts for kind in type(child).__mro__}
        names = {kind.__module__ for kind in kinds} | {nn.functional.__name__}
        spaces: list[Any] = [*filter(None, map(sys.modules.get, sorted(names))), *parts]
        for space in spaces:
            for attribute in [key for key, each in vars(space).items() if each is function]:
                self.set(space, attribute, other)

    def collective(self, function: Callable[..., Any], *args: Any) -> None:
        """Add a callback that needs all ranks. Without them it is left out."""
        self.callback(lambda: None if self.alone else function(*args))

    def abandon(self) -> None:
        """Undo what this rank can undo alone."""
        self.alone = True
        self.close()


@contextmanager
def replaced_entries(entries: Iterable[tuple[MutableMapping[Any, Any], Any, Any]]) -> Iterator[None]:
    """Let mappings have other values inside, such as the attributes of an object. Each entry: mapping, key, value."""
    entries = list(entries)
    before = [(held, key, held.get(key, ABSENT)) for held, key, _ in entries]
    for held, key, value in entries:
        held[key] = value
    try:
        yield
    finally:
        for held, key, value in before:
            held.pop(key, None) if value is ABSENT else held.update({key: value})


@contextmanager
def replaced_attributes(owner: Any, **values: Any) -> Iterator[None]:
    """Let a class or an object have other values of its own attributes inside."""
    with UndoStack() as undo:
        for name, value in values.items():
            undo.set(owner, name, value)
        yield
