"""The catalogue of accelerators, with overrides, checked field by field.

Its data are YAML files: the package's in `conf/hardware/`, then those of the user's folder.
"""

import os
from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_3d.errors import PlannerError, did_you_mean
from lightning_3d.tools.planner.hardware import Accelerator, Cluster, Price, split_cluster
from lightning_3d.tools.planner.plain_yaml import conf_folder, read_plain

CALIBRATED = "this-machine"
"""Name of the entry that `lightning-3d calibrate` writes."""
MOST_LIKE = 50
"""Longest chain of `like:` entries."""


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
                f"no accelerator is called {name!r}{_hint(name.lower(), [*self._entries, *self._aliases])}"
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


def apply_overrides(accelerator: Accelerator, overrides: list[str]) -> Accelerator:
    """`accelerator` with `FIELD=VALUE` changes; `price=` is dollars per hour, `peak_tflops.DTYPE=` one peak."""
    for text in overrides:
        name, separator, given = text.partition("=")
        name = "price" if name == "price.dollars_per_hour" else name
        field, _, dtype = name.partition(".")
        if not separator or field not in NUMBERS or (dtype and field != "peak_tflops"):
            raise PlannerError(f"{text!r} is not FIELD=VALUE{_hint(name, NUMBERS)}")
        peaks = accelerator.peak_tflops
        if dtype and dtype not in peaks:
            raise PlannerError(f"{text!r}: {accelerator.name} has no peak for {dtype}{_hint(dtype, peaks)}")
        try:
            amount = float(given)
        except ValueError:
            raise PlannerError(f"{text!r}: {given!r} is not a number.") from None
        value: Any = number(field, amount, f"{text!r}: {name}")
        if field == "peak_tflops":
            value = MappingProxyType({**peaks, dtype: value} if dtype else dict.fromkeys(peaks, value))
        changed: dict[str, Any] = {field: Price(dollars_per_hour=value) if field == "price" else value}
        accelerator = replace(accelerator, **changed)
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


DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")
LEAST, MOST = 1e-6, 1e9
"""Between them is any rate, size or price that hardware has; beyond them sums are no longer of this world."""
FIELDS = {field.name: field for field in fields(Accelerator) if field.name != "name"}
NUMBERS = FIELDS.keys() - {"title", "source", "runs_here"}
_REQUIRED = sorted(name for name, f in FIELDS.items() if f.default is MISSING and f.default_factory is MISSING)
_SHARES = {"matrix_share", "attention_share", "link_share", "slow_share"}
_WHOLE = {"devices_per_node", "link_domain"}
_FREE = {
    "reserved_gb",
    "watts",
    "link_domain",
    "failure_hours",
    "slow_share",
    "price",
    *(n for n in FIELDS if n.endswith("_us")),
}
"""May be 0: nothing reserved, power not known, devices of their own, no time lost, no cost."""
LARGEST = {
    "memory_gb": (4096, "MB"),
    "host_memory_gb": (65536, "MB"),
    "peak_tflops": (100_000, "GFLOP/s"),
    "memory_gb_per_s": (100_000, "MB/s"),
    "node_link_gb_per_s": (20_000, "MB/s or Gb/s"),
    "cluster_link_gb_per_s": (10_000, "MB/s or Gb/s"),
}
"""Numbers that no device has, and the unit that they were probably written in."""


def accelerator_of_entry(name: str, entry: Mapping[str, Any], where: str = "the catalogue") -> Accelerator:
    """The accelerator that `entry`, which stands in `where`, describes."""
    about = f"{where}: accelerator {name!r}"
    _refuse_unknown(entry, FIELDS, about)
    missing = [field for field in _REQUIRED if field not in entry]
    if missing:
        raise PlannerError(f"{about} lacks {', '.join(missing)}.")
    return Accelerator(name=name, **{field: _value(field, value, about) for field, value in entry.items()})


def number(field: str, value: Any, what: str) -> float:
    """`value`, if `field` can have it; `what` says in the error where it was given."""
    whole, zero, most = field in _WHOLE, field in _FREE, 1 if field in _SHARES else MOST
    least = 1 if whole else LEAST
    text = f"a finite number above 0, from {LEAST:g} to {MOST:g}"
    if field in _SHARES:
        text = f"a share {'of' if zero else 'above'} 0 {'to 1' if zero else 'and at most 1'}"
    elif whole:
        text = f"a whole number from {0 if zero else 1} to {MOST:g}"
    elif zero:
        text = f"0 or a finite number from {LEAST:g} to {MOST:g}"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (least <= value <= most or (value == 0 and zero)) or (whole and value != int(value)):
        raise PlannerError(f"{what} must be {text}, not {_shown(value)}.")
    highest, unit = LARGEST.get(field, (MOST, ""))
    if value > highest:
        raise PlannerError(f"{what} is {value:g}, and no device has more than {highest:g}: is it in {unit}?")
    return int(value) if whole else value


def _refuse_unknown(entry: Mapping[str, Any], known: Any, about: str) -> None:
    unknown = sorted(map(str, set(entry) - set(known)))
    if unknown:
        raise PlannerError(f"{about} has an unknown field {unknown[0]!r}{_hint(unknown[0], known)}")


def _hint(name: str, known: Any) -> str:
    return did_you_mean(name, known) or f". Known: {', '.join(sorted(known))}."


def _value(field: str, value: Any, about: str) -> Any:
    what = f"{about}: {field}"
    if value is None and FIELDS[field].default is None:
        return None
    if field == "runs_here":
        return _typed(bool, "true or false", value, what)
    if field in ("title", "source"):
        return _typed(str, "text", value, what)
    if field == "peak_tflops":
        return _peaks(field, value, what)
    return _price(field, value, what) if field == "price" else number(field, value, what)


def _typed(kind: type, words: str, value: Any, what: str) -> Any:
    if not isinstance(value, kind):
        raise PlannerError(f"{what} must be {words}, not {_shown(value)}.")
    return value


def _peaks(field: str, value: Any, what: str) -> MappingProxyType[str, float]:
    if not isinstance(value, Mapping) or not value:
        raise PlannerError(f"{what} must say the peak of each dtype, as in {{bf16: 100}}, not {_shown(value)}.")
    for dtype in value:
        if dtype not in DTYPES:
            raise PlannerError(f"{what} has an unknown dtype {_shown(dtype)}{_hint(str(dtype), DTYPES)}")
    return MappingProxyType({dtype: float(number(field, peak, f"{what}.{dtype}")) for dtype, peak in value.items()})


def _price(field: str, value: Any, what: str) -> Price:
    """A plain number is dollars per hour."""
    if not isinstance(value, Mapping):
        return Price(dollars_per_hour=number(field, value, what))
    _refuse_unknown(value, ("dollars_per_hour", "date", "source"), what)
    if "dollars_per_hour" not in value:
        raise PlannerError(f"{what} lacks dollars_per_hour.")
    texts = {name: _typed(str, "text", value[name], f"{what}.{name}") for name in value if name != "dollars_per_hour"}
    return Price(dollars_per_hour=number(field, value["dollars_per_hour"], f"{what}.dollars_per_hour"), **texts)


def _shown(value: Any) -> str:
    """`value` as a person wrote it, shortened."""
    text = f"{value:g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
