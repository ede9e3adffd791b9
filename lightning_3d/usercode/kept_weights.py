"""Weights that code has kept in attributes: containers with them, or with their ids, get the objects of now.

Parts of weights take the place of the user's own objects. `self.frozen = set(self.encoder.parameters())` would find
none of them, `id(weight) in self.slow` would be False, and the optimizer would train what the code leaves out.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import is_
from types import ModuleType
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_3d.module.anatomy import codes_of
from lightning_3d.sandbox.interceptor import is_users
from lightning_3d.sandbox.snapshot import own

_LONG = 10_000
"""Entries of a container beyond which it is data."""
_OTHERS = (nn.Module, Optimizer, type, ModuleType)
"""Objects that are no plain ones of the user's: optimizers get their parameters with their states."""


def swap_kept(owners: Sequence[object], swaps: Mapping[nn.Parameter, nn.Parameter]) -> list[tuple[object, str]]:
    """Swap weights and their ids in plain containers of the attributes of `owners`, and of objects of the user there.

    Returns the attributes in which code looks weights up: by a key, in a set, by an id.
    """
    if not swaps:
        return []
    names = {id(before): now for before, now in swaps.items()}
    looked_up, seen = list[tuple[object, str]](), set[int]()
    values = [each for owner in owners for each in own(owner).values() if not isinstance(each, _OTHERS)]
    for owner in (*owners, *(each for each in values if hasattr(each, "__dict__") and is_users(type(each)))):
        for name, value in own(owner).items():
            swap = _Swap(names, seen)
            new = swap.of(value)
            if swap.looked_up:
                looked_up.append((owner, name))
            if new is not value:
                vars(owner)[name] = new
    return looked_up


class _Swap:
    def __init__(self, names: Mapping[int, nn.Parameter], seen: set[int]) -> None:
        self.names, self.seen = names, seen
        self.looked_up = False

    def of(self, value: Any, *, key: bool = False) -> Any:
        """`value`, changed in place, or what takes its place."""
        if isinstance(value, nn.Parameter) and id(value) in self.names:
            self.looked_up |= key
            return self.names[id(value)]
        if type(value) is int and value in self.names:
            self.looked_up = True
            return id(self.names[value])
        if not isinstance(value, list | tuple | dict | set | frozenset) or len(value) > _LONG or id(value) in self.seen:
            return value
        self.seen.add(id(value))
        if isinstance(value, dict):
            items: list[Any] = [(self.of(name, key=True), self.of(each)) for name, each in value.items()]
            same = all(map(is_, chain(*items), chain(*value.items())))
        else:
            items = [self.of(each, key=key or isinstance(value, set | frozenset)) for each in value]
            same = all(map(is_, items, value))
        return value if same else _filled(value, items)


def _filled(value: Any, items: list[Any]) -> Any:
    """`value` with other `items`: the same object, where it can change."""
    if isinstance(value, tuple):
        return value._make(items) if hasattr(value, "_make") else tuple(items)
    if isinstance(value, frozenset):
        return frozenset(items)
    value.clear()
    (value.extend if isinstance(value, list) else value.update)(items)
    return value


def warn_of_lookups(module: LightningModule, looked_up: Sequence[tuple[object, str]], stage: int) -> None:
    """Warn where `training_step` reads one of the attributes of `module` in which code looks weights up."""
    codes = codes_of(type(module), "training_step") if looked_up else ()
    read = {name for code in codes for name in code.co_names}
    for name in (name for owner, name in looked_up if owner is module and name in read):
        rank_zero_warn(
            f"training_step reads self.{name}, which has weights or their ids as keys. With zero_stage={stage} it gets"
            " gathered weights from self.parameters(), which are other objects: it finds none of them. Use names as"
            " keys: named_parameters()."
        )
