"""Changes that are undone in reverse order: attributes of modules, hooks, patches."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class ABSENT:
    """Marks an attribute that did not exist. A class, because a deep copy keeps its identity."""


class Change:
    """A new value for an instance attribute of a module, past `nn.Module.__setattr__`."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self.owner, self.name = owner, name
        self.before = owner.__dict__.get(name, ABSENT)
        owner.__dict__[name] = value

    def revert(self) -> None:
        self.put(self.before)

    def put(self, value: Any) -> None:
        if value is ABSENT:
            self.owner.__dict__.pop(self.name, None)
        else:
            self.owner.__dict__[self.name] = value

    def now(self) -> Any:
        return self.owner.__dict__.get(self.name, ABSENT)


@dataclass
class Undo:
    """Steps that put back what was changed, run in reverse order."""

    steps: list[Callable[[], None]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    """The changed attributes among the steps."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an instance attribute, past `nn.Module.__setattr__`, and remember the old value."""
        self.changes.append(Change(owner, name, value))
        self.steps.append(self.changes[-1].revert)

    def run(self) -> None:
        while self.steps:
            self.steps.pop()()
