"""The catalogue of accelerators: shipped YAML, the user's own, and overrides."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_3d.errors import PlannerError
from lightning_3d.planner.entries import NUMBERS, accelerator_of_entry, near, number
from lightning_3d.planner.hardware import Accelerator, Cluster, Price, split_cluster
from lightning_3d.planner.plain_yaml import read_plain
from lightning_3d.resources import conf_folder

MOST_LIKE = 50
"""Entries that one may be like in turn."""


class Catalogue:
    """Accelerators by name and alias, in any case. An entry is checked when it is asked for: a wrong one of the user's
    folder is in nobody's way until then."""

    def __init__(self, entries: Mapping[str, Mapping[str, Any]], files: Mapping[str, Path]) -> None:
        self._entries, self._files = entries, files
        self._aliases = {alias: name for name, entry in entries.items() for alias in _aliases(entry) or ()}

    @classmethod
    def load(cls, *extra: Path) -> "Catalogue":
        """The shipped files, then the user's (`$XDG_CONFIG_HOME/lightning-3d/hardware`), then `extra` files."""
        shipped = sorted((conf_folder() / "hardware").glob("*.yaml"))
        own = sorted(user_folder().glob("*.yaml"))
        entries: dict[str, Mapping[str, Any]] = {}
        files: dict[str, Path] = {}
        for path in (*shipped, *own, *extra):
            read = _read(path)
            entries.update(read)
            files.update(dict.fromkeys(read, path))
        return cls(entries, files)

    @property
    def names(self) -> list[str]:
        return sorted(self._entries)

    @property
    def complete(self) -> list[Accelerator]:
        """The accelerators whose entries can be used."""
        found = []
        for name in self.names:
            try:
                found.append(self.find(name))
            except PlannerError:
                continue
        return found

    def find(self, name: str, **overrides: Any) -> Accelerator:
        """The accelerator called `name`, with any of its numbers overridden."""
        key = self._key(name)
        if key is None:
            raise PlannerError(
                f"no accelerator is called {name!r}{near(name.lower(), [*self._entries, *self._aliases])}"
            )
        return accelerator_of_entry(key, {**self._resolve(key), **overrides}, str(self._files[key]))

    def cluster(self, text: str, **overrides: Any) -> Cluster:
        """The cluster that `text` describes: `128x8xh100`, `8xa100-80g`, `h100`."""
        nodes, devices, name = self.split(text)
        return Cluster.shaped(self.find(name, **overrides), nodes, devices)

    def split(self, text: str) -> tuple[int | None, int | None, str]:
        """Nodes, devices and the accelerator's name in `text`, as `split_cluster` has it."""
        return split_cluster(text, known={*self._entries, *self._aliases})

    def _key(self, name: str) -> str | None:
        """The entry called `name`. Names come before aliases: no entry hides another."""
        key = name.strip().lower()
        return key if key in self._entries else self._aliases.get(key)

    def _resolve(self, key: str, seen: tuple[str, ...] = ()) -> dict[str, Any]:
        entry, where = dict(self._entries[key]), f"{self._files[key]}: accelerator {key!r}"
        base = entry.pop("like", None)
        if _aliases(entry) is None:
            raise PlannerError(f"{where}: aliases must be a name or a list of them, not {entry['aliases']!r}.")
        entry.pop("aliases", None)
        if base is None:
            return entry
        if not isinstance(base, str):
            raise PlannerError(f"{where}: like must be the name of one other accelerator, not {base!r}.")
        other = self._key(base)
        if other is None or other in (*seen, key):
            raise PlannerError(
                f"{where} is `like: {base}`, which {'does not exist' if other is None else 'is like it in turn'}."
            )
        if len(seen) == MOST_LIKE:
            raise PlannerError(f"{where} ends a chain of more than {MOST_LIKE} `like:`. Write its numbers out.")
        return {**self._resolve(other, (*seen, key)), **entry}


def user_folder() -> Path:
    """Where a user's own catalogue files are, and where `lightning-3d calibrate` writes."""
    config = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(config) / "lightning-3d" / "hardware"


def override(text: str) -> tuple[str, Any]:
    """`"memory_gb=96"` or `"peak_tflops.bf16=800"` as a field and its value."""
    name, separator, value = text.partition("=")
    name = "price" if name == "price.dollars_per_hour" else name
    field, _, part = name.partition(".")
    if not separator or field not in NUMBERS or (part and field != "peak_tflops"):
        raise PlannerError(f"{text!r} is not FIELD=VALUE{near(name, NUMBERS)}")
    try:
        return name, number(field, float(value), f"{text!r}: {name}")
    except ValueError as error:
        if isinstance(error, PlannerError):
            raise
        raise PlannerError(f"{text!r}: {value!r} is not a number.") from None


def apply_overrides(accelerator: Accelerator, overrides: list[str]) -> Accelerator:
    """`accelerator` with `FIELD=VALUE` changes; `price=` is dollars per hour, `peak_tflops.DTYPE=` one peak."""
    for text in overrides:
        name, value = override(text)
        head, _, dtype = name.partition(".")
        if dtype and dtype not in accelerator.peak_tflops:
            raise PlannerError(
                f"{text!r}: {accelerator.name} has no peak for {dtype}{near(dtype, accelerator.peak_tflops)}"
            )
        if head == "price":
            accelerator = replace(accelerator, price=Price(dollars_per_hour=value))
        elif head == "peak_tflops":
            peaks = (
                {**accelerator.peak_tflops, dtype: value} if dtype else dict.fromkeys(accelerator.peak_tflops, value)
            )
            accelerator = replace(accelerator, peak_tflops=MappingProxyType(peaks))
        else:
            accelerator = replace(accelerator, **{head: value})
    return accelerator


def _read(path: Path) -> dict[str, dict[str, Any]]:
    content = read_plain(path, "hardware file")
    if not isinstance(content, dict):
        raise PlannerError(f"hardware file {path} must map accelerators to their numbers.")
    for name, entry in content.items():
        if not isinstance(entry, dict):
            raise PlannerError(f"hardware file {path} must map accelerators to their numbers, and {name!r} has none.")
    return {str(name).strip().lower(): dict(entry) for name, entry in content.items()}


def _aliases(entry: Mapping[str, Any]) -> list[str] | None:
    """Other names of `entry`, one or a list (3090 is one); None where they are no names."""
    given = entry.get("aliases", [])
    names = given if isinstance(given, list) else [given]
    if not all(type(name) in (str, int) and str(name).strip() for name in names):
        return None
    return [str(name).strip().lower() for name in names]
