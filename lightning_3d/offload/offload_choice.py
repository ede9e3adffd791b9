"""`Offload`: the user's choice of what is in host memory or on a disk while nothing uses it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lightning_3d.errors import NO_PIPELINE, ConfigurationError
from lightning_3d.layout import Layout
from lightning_3d.module.host_memory import bytes_in

OffloadArgument = Literal["none", "all"] | Mapping[str, str] | None
"""What `Strategy3D(offload=...)` takes."""
KINDS = ("optimizer", "parameters", "activations")
BUDGET = 10**9
"""Bytes of memory for what is on its way from or to a disk, if the user gives none."""
_DISK = "nvme:"
_EXAMPLE = 'offload={"optimizer": "nvme:/scratch", "parameters": "cpu", "activations": "cpu"}'


@dataclass(frozen=True)
class Place:
    """Host memory, or a folder on a disk of this machine."""

    folder: str | None = None


HOST = Place()


@dataclass(frozen=True)
class Offload:
    """The place of each kind of tensor; None leaves it on the device."""

    optimizer: Place | None = None
    parameters: Place | None = None
    activations: Place | None = None
    budget: int = BUDGET
    lenient: bool = False
    """True for "all", which changes nothing where the data axis shards nothing."""

    @classmethod
    def of(cls, wanted: OffloadArgument, budget: str | float | None) -> "Offload":
        """Check the two arguments of `Strategy3D`."""
        if wanted in (None, "none", "all"):
            chosen = {"optimizer": HOST, "parameters": HOST} if wanted == "all" else {}
        elif isinstance(wanted, Mapping):
            if unknown := sorted(set(map(str, wanted)) - set(KINDS)):
                raise ConfigurationError(
                    f"offload has {unknown[0]!r}, which is not one of {', '.join(map(repr, KINDS))}. Write {_EXAMPLE}."
                )
            chosen = {kind: _place(kind, where) for kind, where in wanted.items()}
        else:
            raise ConfigurationError(f"offload={wanted!r} is not one of 'none', 'all' or a dict. Write {_EXAMPLE}.")
        on_disk = any(place.folder is not None for place in chosen.values())
        if budget is not None and not on_disk:
            raise ConfigurationError(
                f"offload_budget={budget!r} is the memory of a rank for what is on its way from or to a disk, and"
                f" nothing is on one. Leave it out, or write {_EXAMPLE}."
            )
        size = BUDGET if budget is None else bytes_in(budget, "offload_budget")
        return cls(**chosen, budget=size, lenient=wanted == "all")

    @property
    def alone(self) -> Literal["optimizer", "activations"] | None:
        """The one kind that is elsewhere while parameters are on the device."""
        if self.parameters is not None:
            return None
        return "optimizer" if self.optimizer is not None else None if self.activations is None else "activations"

    @property
    def on_disk(self) -> bool:
        return any(place is not None and place.folder is not None for place in (self.optimizer, self.parameters))

    def check(self, layout: Layout) -> None:
        """Raise where `layout` cannot have the parameters elsewhere."""
        if self.parameters is None or self.lenient:
            return
        if layout.zero_stage == 0:
            raise ConfigurationError(
                'offload has "parameters", and zero_stage=0 needs all of them all the time. Use zero_stage=3, also on'
                ' one device, or leave "parameters" out: "optimizer" and "activations" work in every stage.'
            )
        if not layout.shards_data:
            raise ConfigurationError(
                f'offload has "parameters". This saves nothing with one data rank in {layout}, where all parameters of'
                f" a rank are gathered during a step. Use zero_stage=3 and {NO_PIPELINE}, or leave"
                ' "parameters" out: "optimizer" and "activations" work in every layout.'
            )


NOTHING = Offload()


def _place(kind: str, where: Any) -> Place:
    if where == "cpu":
        return HOST
    folder = where.removeprefix(_DISK) if isinstance(where, str) and where.startswith(_DISK) else ""
    if not folder or kind == "activations":
        places = "'cpu'" if kind == "activations" else "'cpu' or 'nvme:' and a folder"
        raise ConfigurationError(f"offload has {kind!r}: {where!r}, which is not {places}. Write {_EXAMPLE}.")
    return Place(folder)
