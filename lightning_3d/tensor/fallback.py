"""Calls of a block that its proof did not cover: they compute whole, on gathered parameters, as one device would.

A proof covers the kinds of call that were seen when the module was planned. A later one may hand the block something
else (a cache, a mask for each head) whose division over the ranks nobody looked at.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from lightning_3d.tensor.autograd_collectives import gather, local_shard
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.tensor_plan import UnitPlan


class ABSENT:
    """Stands for an attribute that was not there; a class, so that it stays itself in a deep copy."""


class Change:
    """An instance attribute of a module, past `nn.Module.__setattr__`: what it was and what it is now."""

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self.owner, self.name = owner, name
        self.before = owner.__dict__.get(name, ABSENT)
        owner.__dict__[name] = value

    def revert(self) -> None:
        self.put(self.before)

    def put(self, value: Any) -> None:
        if value is ABSENT:
            self.owner.__dict__.pop(self.name, None)
        else:
            self.owner.__dict__[self.name] = value

    def now(self) -> Any:
        return self.owner.__dict__.get(self.name, ABSENT)


def form_of(value: Any) -> Any:
    """What decides how a block's code treats an argument: structure, dimensions, flags; no sizes and no values."""
    if isinstance(value, Tensor):
        return value.dim(), value.is_floating_point()
    if isinstance(value, tuple | list):
        return isinstance(value, tuple), *map(form_of, value)
    if isinstance(value, dict):
        return tuple((key, form_of(item)) for key, item in value.items())
    return value if isinstance(value, bool | str | None) else type(value).__qualname__


def warn_unsplit(unit: nn.Module) -> None:
    """Say, once for each kind of block, that it computes whole."""
    warnings.warn(
        f"{type(unit).__name__} is called in a way that it was not when it was planned (other arguments, or in another"
        " mode), so these calls compute it whole on every tensor rank. That is correct, but slow. Plan it with a batch"
        " of each kind that it is used on, if this is often.",
        stacklevel=4,
    )


@contextmanager
def compute_unsplit(unit: nn.Module, plan: UnitPlan, changes: list[Change], axis: Axis) -> Iterator[None]:
    """While open, `unit` finds whole parameters, and its numbers and forwards as they were."""
    found = [(change, change.now()) for change in changes]  # a pipeline puts a forward of its own over a block's
    for change in reversed(changes):
        change.revert()
    shadows = []
    try:
        for name, split in plan.splits.items():
            owner = unit.get_submodule(name.rpartition(".")[0])
            own_name = name.rpartition(".")[2]
            shadows.append(Change(owner, own_name, gather(local_shard(owner._parameters[own_name]), axis, split)))  # type: ignore[arg-type]
        yield
    finally:
        for shadow in shadows:
            shadow.revert()
        for change, value in found:
            change.put(value)
