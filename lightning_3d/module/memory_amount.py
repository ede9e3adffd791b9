"""`bytes_in`: an amount of memory as the user writes it. `in_words` writes it."""

import re

from lightning_3d.errors import ConfigurationError

_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def bytes_in(amount: str | float, argument: str) -> int:
    """Return the bytes of `amount`, which the user gave for `argument`: "20GB", "500MB" or a number of bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B|)\s*", str(amount).upper())
    if found is None or float(found[1]) <= 0:
        raise ConfigurationError(
            f"{argument}={amount!r} is no amount of memory. Write '20GB' or '500MB', or a number of bytes."
        )
    return int(float(found[1]) * _UNITS[found[2]])


def in_words(nbytes: float) -> str:
    """`nbytes` in the largest unit of which it has one: "12.00 KB"."""
    unit = max((unit for unit in _UNITS if unit and _UNITS[unit] <= nbytes), key=lambda each: _UNITS[each], default="B")
    return f"{nbytes / _UNITS[unit]:,.2f} {unit}"
