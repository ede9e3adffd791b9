"""The members of the zoo: each names the layouts in which tests train it, and the reason why it is here.

Who meets a module that trains wrongly adds it to the file of its kind, with `member` above the class.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LAYOUTS = ("tensor", "pipeline", "zero", "planned")
"""Three are trained; a module that is *planned* is given to the planner only."""


@dataclass(frozen=True)
class Member:
    build: Callable[..., Any]
    layouts: tuple[str, ...]
    because: str
    """The class of users or the mistake that it stands for."""


_members: dict[str, dict[str, Member]] = {}


def member(*layouts: str, because: str, name: str | None = None) -> Callable[[Any], Any]:
    """Register the class or function below."""

    def register(build: Any) -> Any:
        file = build.__module__.rpartition(".")[2]
        _members.setdefault(file, {})[name or build.__name__] = Member(build, layouts, because)
        return build

    return register


def members(file: str) -> dict[str, Member]:
    """Those of one file of the zoo, by name."""
    importlib.import_module(f"tests.zoo.{file}")
    return _members.get(file, {})


def files() -> list[str]:
    return [file.name for file in pkgutil.iter_modules(importlib.import_module("tests.zoo").__path__)]
