"""`Recompute`: the user's choice between memory for activations and a second forward."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from lightning_3d.errors import ConfigurationError

RecomputeMode = Literal["full", "selective", "auto"]
_UNITS = {"": 1, "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


@dataclass(frozen=True)
class Recompute:
    """Which activations of a block backward computes again."""

    mode: RecomputeMode | None = None
    """None keeps all. "full" keeps what enters a block. "selective" also keeps results of products, attention and
    collectives. "auto" is "full" for as few blocks as the budget allows."""
    budget: int | None = None
    """For "auto": bytes of activations that one rank may keep."""

    @classmethod
    def of(cls, mode: RecomputeMode | None, budget: str | float | None) -> "Recompute":
        """Check the two arguments of `Strategy3D`."""
        if mode is not None and mode not in get_args(RecomputeMode):
            known = ", ".join(map(repr, get_args(RecomputeMode)))
            raise ConfigurationError(f"recompute={mode!r} is none of None, {known}.")
        if (mode == "auto") != (budget is not None):
            raise ConfigurationError(
                f"recompute={mode!r} with recompute_budget={budget!r}: the budget is what recompute='auto' needs, and"
                " only that reads it. It is the memory of one rank for activations. Use"
                " recompute='auto', recompute_budget='20GB', or recompute='full' without a budget."
            )
        return cls(mode, None if budget is None else _bytes_in(budget))


KEEP_ALL = Recompute()


def _bytes_in(amount: str | float) -> int:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B|)\s*", str(amount).upper())
    if found is None or float(found[1]) <= 0:
        raise ConfigurationError(
            f"recompute_budget={amount!r} is no amount of memory. Write '20GB' or '500MB', or a number of bytes."
        )
    return int(float(found[1]) * _UNITS[found[2]])
