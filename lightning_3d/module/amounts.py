"""Amounts: reading and writing `300B` tokens, `30 days`, 12.3 GB; the divisors of a number."""

import re
from math import isfinite, isqrt

from lightning_3d.errors import PlannerError

_COUNT = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "mo": 30 * 86400.0, "y": 365.25 * 86400}
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?:_\d{3})+|\d+)(?:\.\d*)?|\.\d+"
"""Commas stand between thousands only: 1,5 is neither 15 nor 1.5."""
_AMOUNT = re.compile(rf"([+-]?(?:{_DIGITS}))(?:(e[+-]?\d+)|\s*([kmbgt]?))", re.IGNORECASE)
_UNITS = r"s|mo|m|h|d|w|y|seconds?|minutes?|months?|hours?|days?|weeks?|years?"
_DURATION = re.compile(rf"([+-]?(?:{_DIGITS})(?:e[+-]?\d+)?)\s*({_UNITS})", re.IGNORECASE)
MOST = 1e24
"""Amounts above it are slips of the hand, and what is computed from them would overflow."""
LEAST = 1e-9


def parse_count(text: str, what: str) -> float:
    """`"300B"`, `"1.4T"`, `"2e9"`, `"20000"` or `"20,000"` as a number above 0; `what` names it in the error."""
    match = _AMOUNT.fullmatch(text.strip())
    if match is None:
        raise PlannerError(f"{what} {text!r} is not an amount: write 300B, 1.4T, 2e9, 20000 or 20,000.")
    number, power, suffix = match.groups()
    return _sane(float(_plain(number) + (power or "")) * _COUNT[(suffix or "").lower()], f"{what} {text!r}")


def positive(number: float, what: str) -> float:
    """`number`, if it is one above 0; `what` names it in the error."""
    return _sane(number, f"{what} {number:g}")


def parse_duration(text: str) -> float:
    """`"30 days"`, `"12h"`, `"2 weeks"`, `"1 month"` (30 days) as seconds above 0."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise PlannerError(f'time {text!r} is not a duration: write "30 days", "12 hours", "2 weeks" or "1 month".')
    unit = match[2].lower()
    return _sane(float(_plain(match[1])) * _SECONDS["mo" if unit.startswith("mo") else unit[0]], f"time {text!r}")


def _plain(number: str) -> str:
    return number.replace(",", "").replace("_", "")


def _sane(amount: float, shown: str) -> float:
    if not isfinite(amount):
        raise PlannerError(f"{shown} must be a finite number.")
    if amount <= 0:
        raise PlannerError(f"{shown} must be above 0.")
    if not LEAST <= amount <= MOST:
        raise PlannerError(f"{shown} is no amount of this world: give {LEAST:g} to {MOST:g}.")
    return amount


def divisors(number: int) -> list[int]:
    """Divisors of `number`, smallest first."""
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def real(text: str | float) -> float:
    """A number of an option, also `nan` and `inf`, which are refused where it is known what it is for."""
    return float(text)


def show_bytes(amount: float) -> str:
    """Bytes in the largest decimal unit that leaves at least 1: `12.3 GB`."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if amount >= size:
            return f"{amount / size:.3g} {unit}" if amount < 1000 * size else f"{amount / size:.0f} {unit}"
    return f"{amount:.0f} B"


def show_count(amount: float) -> str:
    """`1.65B`, `124M`, `300B`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if amount >= size:
            return f"{amount / size:.4g}{unit}"
    return f"{amount:.0f}"


def show_seconds(seconds: float) -> str:
    """`3.70 s`, `12.0 min`, `5.2 h`, `34.0 days`, `288 years`."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    for unit, size, most in (("s", 1.0, 120.0), ("min", 60.0, 120.0), ("h", 3600.0, 48.0), ("days", 86400.0, 1000.0)):
        if seconds < size * most:
            return f"{seconds / size:.2f} {unit}" if unit == "s" else f"{seconds / size:.1f} {unit}"
    return f"{seconds / _SECONDS['y']:.0f} years"


def show_dollars(amount: float) -> str:
    return f"${amount:,.0f}" if amount >= 100 else f"${amount:,.2f}"


def show_hours(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.3g}"
