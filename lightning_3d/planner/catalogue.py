"""The catalogue of accelerators: shipped YAML, the user's own, and overrides."""

import os
from dataclasses import fields, replace
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lightning_3d.errors import PlannerError
from lightning_3d.planner.hardware import Accelerator, Cluster, Price, split_cluster
from lightning_3d.resources import conf_folder

_FIELDS = {field.name for field in fields(Accelerator)} - {"name"}
_NUMBERS = _FIELDS - {"title", "runs_here"}


class Catalogue:
    """Accelerators by name and alias."""

    def __init__(self, entries: dict[str, dict[str, Any]]) -> None:
        self._entries = entries
        self._aliases = {str(alias): name for name, entry in entries.items() for alias in entry.get("aliases", ())}

    @classmethod
    def load(cls, *extra: Path) -> "Catalogue":
        """The shipped files, then the user's (`$XDG_CONFIG_HOME/lightning-3d/hardware`), then `extra` files."""
        shipped = sorted((conf_folder() / "hardware").glob("*.yaml"))
        own = sorted(user_folder().glob("*.yaml"))
        entries: dict[str, dict[str, Any]] = {}
        for path in (*shipped, *own, *extra):
            entries.update(_read(path))
        return cls(entries)

    @property
    def names(self) -> list[str]:
        return sorted(self._entries)

    def find(self, name: str, **overrides: Any) -> Accelerator:
        """The accelerator called `name`, with any of its numbers overridden."""
        key = self._aliases.get(name.lower(), name.lower())
        if key not in self._entries:
            raise PlannerError(f"no accelerator is called {name!r}{_near(key, [*self._entries, *self._aliases])}")
        return _build(key, {**self._resolve(key), **overrides})

    def cluster(self, text: str, **overrides: Any) -> Cluster:
        """The cluster that `text` describes: `128x8xh100`, `8xa100-80g`, `h100`."""
        nodes, devices, name = split_cluster(text)
        accelerator = self.find(name, **overrides)
        if nodes is None:
            return Cluster.of(accelerator, 1 if devices is None else devices)
        if nodes < 1 or not devices:
            raise PlannerError(f"cluster {text!r} has no devices: give at least 1x1.")
        return Cluster(accelerator=accelerator, nodes=nodes, devices_per_node=devices)

    def _resolve(self, key: str, seen: tuple[str, ...] = ()) -> dict[str, Any]:
        entry = dict(self._entries[key])
        base = entry.pop("like", None)
        entry.pop("aliases", None)
        if base is None:
            return entry
        if base not in self._entries or base in (*seen, key):
            raise PlannerError(f"accelerator {key!r} is `like: {base}`, which {_why(base, self._entries)}.")
        return {**self._resolve(base, (*seen, key)), **entry}


def user_folder() -> Path:
    """Where a user's own catalogue files are, and where `lightning-3d calibrate` writes."""
    config = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(config) / "lightning-3d" / "hardware"


def override(text: str) -> tuple[str, Any]:
    """`"memory_gb=96"` or `"peak_tflops.bf16=800"` as a field and its value."""
    name, separator, value = text.partition("=")
    if not separator or name.split(".")[0] not in _NUMBERS:
        raise PlannerError(f"{text!r} is not FIELD=VALUE{_near(name, sorted(_NUMBERS))}")
    try:
        number = float(value)
    except ValueError:
        raise PlannerError(f"{text!r}: {value!r} is not a number.") from None
    return name, int(number) if name == "devices_per_node" else number


def apply_overrides(accelerator: Accelerator, overrides: list[str]) -> Accelerator:
    """`accelerator` with `FIELD=VALUE` changes; `price=` is dollars per hour, `peak_tflops.DTYPE=` one peak."""
    for text in overrides:
        name, value = override(text)
        if not (isfinite(value) and value > 0):
            raise PlannerError(f"{text!r}: {name} must be a number above 0.")
        head, _, dtype = name.partition(".")
        if dtype and dtype not in accelerator.peak_tflops:
            raise PlannerError(
                f"{text!r}: {accelerator.name} has no peak for {dtype}{_near(dtype, accelerator.peak_tflops)}"
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
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except FileNotFoundError:
        raise PlannerError(f"hardware file {path} does not exist.") from None
    except (OmegaConfBaseException, YAMLError, OSError) as error:
        raise PlannerError(f"hardware file {path} cannot be read: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(entry, dict) for entry in content.values()):
        raise PlannerError(f"hardware file {path} must map accelerator names to their numbers.")
    return {str(name).lower(): dict(entry) for name, entry in content.items()}


def _build(name: str, entry: dict[str, Any]) -> Accelerator:
    unknown = sorted(set(entry) - _FIELDS)
    if unknown:
        raise PlannerError(f"accelerator {name!r} has an unknown field {unknown[0]!r}{_near(unknown[0], _FIELDS)}")
    required = {"memory_gb", "peak_tflops", "memory_gb_per_s", "node_link_gb_per_s", "cluster_link_gb_per_s"}
    missing = sorted(required - set(entry))
    if missing:
        raise PlannerError(f"accelerator {name!r} lacks {', '.join(missing)}.")
    price = entry.pop("price", None)
    peaks = MappingProxyType({str(dtype): float(peak) for dtype, peak in entry.pop("peak_tflops").items()})
    return Accelerator(name=name, peak_tflops=peaks, price=Price(**price) if price else None, **entry)


def _near(name: str, known: Any) -> str:
    near = get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f": did you mean {' or '.join(near)}?" if near else f". Known: {', '.join(sorted(known))}."


def _why(base: str, entries: dict[str, Any]) -> str:
    return "is like it in turn" if base in entries else "does not exist"
