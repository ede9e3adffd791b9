"""`Recompute`: the user's choice between memory for activations and a second forward."""

from dataclasses import dataclass
from typing import Literal, get_args

from lightning_3d.errors import ConfigurationError
from lightning_3d.module.memory_amount import bytes_in

RecomputeArgument = Literal["full", "selective", "auto"]


@dataclass(frozen=True)
class Recompute:
    """Which activations of a block backward computes again."""

    mode: RecomputeArgument | None = None
    """None keeps all. "full" keeps what enters a block. "selective" also keeps results of products, attention and
    collectives. "auto" is "full" for as few blocks as the budget allows."""
    budget: int | None = None
    """For "auto": bytes of activations that one rank may keep."""

    @classmethod
    def of(cls, mode: RecomputeArgument | None, budget: str | float | None) -> "Recompute":
        """Check the two arguments of `Strategy3D`."""
        if mode is not None and mode not in get_args(RecomputeArgument):
            known = ", ".join(map(repr, get_args(RecomputeArgument)))
            raise ConfigurationError(f"recompute={mode!r} is none of None, {known}.")
        if (mode == "auto") != (budget is not None):
            raise ConfigurationError(
                f"recompute={mode!r} with recompute_budget={budget!r}: the budget is what recompute='auto' needs, and"
                " only that reads it. It is the memory of one rank for activations. Use"
                " recompute='auto', recompute_budget='20GB', or recompute='full' without a budget."
            )
        return cls(mode, None if budget is None else bytes_in(budget, "recompute_budget"))


KEEP_ALL = Recompute()
