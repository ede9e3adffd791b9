"""The catalogue of accelerators: YAML files of the package and of the user, with overrides, checked field by field."""

import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lightning_3d.errors import PlannerError
from lightning_3d.planner.conf_folder import conf_folder
from lightning_3d.planner.hardware import Accelerator, Cluster, Price, split_cluster
from lightning_3d.planner.plain_yaml import read_plain

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


DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")
LEAST, MOST = 1e-6, 1e9
"""Between them is any rate, size or price that hardware has; beyond them sums are no longer of this world."""
FIELDS = {field.name: field for field in fields(Accelerator) if field.name != "name"}
NUMBERS = FIELDS.keys() - {"title", "source", "runs_here"}
_REQUIRED = sorted(name for name, f in FIELDS.items() if f.default is MISSING and f.default_factory is MISSING)
_OPTIONAL = {name for name, field in FIELDS.items() if field.default is None}
_SHARES = {"matrix_share", "link_share"}
_WHOLE = {"devices_per_node", "link_domain"}
_FREE = {
    "reserved_gb",
    "watts",
    "link_domain",
    "failure_hours",
    *(name for name in FIELDS if name.endswith("_us")),
}
"""May be 0: nothing reserved, power not known, devices of their own, no time lost."""


def accelerator_of_entry(name: str, entry: Mapping[str, Any], where: str = "the catalogue") -> Accelerator:
    """The accelerator that `entry`, which stands in `where`, describes."""
    about = f"{where}: accelerator {name!r}"
    unknown = sorted(map(str, set(entry) - FIELDS.keys()))
    if unknown:
        raise PlannerError(f"{about} has an unknown field {unknown[0]!r}{near(unknown[0], FIELDS)}")
    missing = [field for field in _REQUIRED if field not in entry]
    if missing:
        raise PlannerError(f"{about} lacks {', '.join(missing)}.")
    return Accelerator(name=name, **{field: _value(field, value, about) for field, value in entry.items()})


def number(field: str, value: Any, what: str) -> float:
    """`value`, if `field` can have it; `what` says in the error where it was given."""
    least, text = _bounds(field)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlannerError(f"{what} must be {text}, not {_shown(value)}.")
    sane = least <= value <= (1 if field in _SHARES else MOST) or (value == 0 and _may_be_0(field))
    if not sane or (field in _WHOLE and value != int(value)):
        raise PlannerError(f"{what} must be {text}, not {_shown(value)}.")
    _check_unit(field, value, what)
    return int(value) if field in _WHOLE else value


LARGEST = {
    "memory_gb": (4096, "MB"),
    "host_memory_gb": (65536, "MB"),
    "peak_tflops": (100_000, "GFLOP/s"),
    "memory_gb_per_s": (100_000, "MB/s"),
    "node_link_gb_per_s": (20_000, "MB/s or Gb/s"),
    "cluster_link_gb_per_s": (10_000, "MB/s or Gb/s"),
}
"""Numbers that no device has, and the unit that they were probably written in."""


def _check_unit(field: str, value: float, what: str) -> None:
    most, unit = LARGEST.get(field, (MOST, ""))
    if value > most:
        raise PlannerError(f"{what} is {value:g}, and no device has more than {most:g}: is it in {unit}?")


def near(name: str, known: Any) -> str:
    """The end of an error about `name`: the nearest of those that are `known`, or all."""
    found = get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f": did you mean {' or '.join(found)}?" if found else f". Known: {', '.join(sorted(known))}."


def _value(field: str, value: Any, about: str) -> Any:
    if value is None and field in _OPTIONAL:
        return None
    return _READERS.get(field, number)(field, value, f"{about}: {field}")


def _title(field: str, value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise PlannerError(f"{what} must be text, not {_shown(value)}.")
    return value


def _runs_here(field: str, value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise PlannerError(f"{what} must be true or false, not {_shown(value)}.")
    return value


def _peaks(field: str, value: Any, what: str) -> MappingProxyType[str, float]:
    if not isinstance(value, Mapping) or not value:
        raise PlannerError(f"{what} must say the peak of each dtype, as in {{bf16: 100}}, not {_shown(value)}.")
    for dtype in value:
        if dtype not in DTYPES:
            raise PlannerError(f"{what} has an unknown dtype {_shown(dtype)}{near(str(dtype), DTYPES)}")
    return MappingProxyType({dtype: float(number(field, peak, f"{what}.{dtype}")) for dtype, peak in value.items()})


def _price(field: str, value: Any, what: str) -> Price:
    """A plain number is dollars per hour."""
    if not isinstance(value, Mapping):
        return Price(dollars_per_hour=number(field, value, what))
    known = ("dollars_per_hour", "date", "source")
    unknown = sorted(map(str, set(value) - set(known)))
    if unknown:
        raise PlannerError(f"{what} has an unknown field {unknown[0]!r}{near(unknown[0], known)}")
    if "dollars_per_hour" not in value:
        raise PlannerError(f"{what} lacks dollars_per_hour.")
    said = {name: _title(name, value[name], f"{what}.{name}") for name in ("date", "source") if name in value}
    return Price(dollars_per_hour=number(field, value["dollars_per_hour"], f"{what}.dollars_per_hour"), **said)


_READERS: dict[str, Callable[[str, Any, str], Any]] = {
    "title": _title,
    "source": _title,
    "runs_here": _runs_here,
    "peak_tflops": _peaks,
    "price": _price,
}


def _may_be_0(field: str) -> bool:
    return field in _FREE or field == "price"


def _bounds(field: str) -> tuple[float, str]:
    """The least value of `field` other than 0, and its range in words."""
    if field in _SHARES:
        return LEAST, "a share above 0 and at most 1"
    if field in _WHOLE:
        return 1, f"a whole number from {0 if _may_be_0(field) else 1} to {MOST:g}"
    if _may_be_0(field):
        return LEAST, f"0 or a finite number from {LEAST:g} to {MOST:g}"
    return LEAST, f"a finite number above 0, from {LEAST:g} to {MOST:g}"


def _shown(value: Any) -> str:
    """`value` as a person wrote it, shortened."""
    text = f"{value:g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
