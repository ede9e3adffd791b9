"""What a catalogue entry or an override says, checked field by field and made into an `Accelerator`."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from lightning_3d.errors import PlannerError
from lightning_3d.planner.hardware import Accelerator, Price

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "int8")
LEAST, MOST = 1e-6, 1e9
"""Between them is any rate, size or price that hardware has; beyond them sums are no longer of this world."""
FIELDS = {field.name: field for field in fields(Accelerator) if field.name != "name"}
NUMBERS = FIELDS.keys() - {"title", "runs_here"}
_REQUIRED = sorted(name for name, f in FIELDS.items() if f.default is MISSING and f.default_factory is MISSING)
_OPTIONAL = {name for name, field in FIELDS.items() if field.default is None}
_SHARES = {"matrix_share", "link_share"}
_WHOLE = {"devices_per_node", "cores"}
_FREE = {"reserved_gb", "watts", "cores", *(name for name in FIELDS if name.endswith("_us"))}
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
    return int(value) if field in _WHOLE else value


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
    "runs_here": _runs_here,
    "peak_tflops": _peaks,
    "price": _price,
}


def _may_be_0(field: str) -> bool:
    return field in _FREE or field == "price"


def _bounds(field: str) -> tuple[float, str]:
    """The least that `field` can be (beside 0), and all that it can be in words."""
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
