"""Tensors and arrays in attributes that a step writes into (`self.total += loss`): each run writes into copies.

The originals are written to once, when all runs are done: until then a backward may need the values that they had.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_LARGE = 100_000
"""Elements beyond which they are data, which is not copied in each run."""


@dataclass
class Loan:
    """A copy, in the place of what it was made of."""

    holder: dict[Any, Any]
    """In which it is: the attributes of a module, or a dict among them."""
    key: Any
    original: Any
    lent: Any

    def end(self) -> bool:
        """Put the original back; whether something else was written into the copy."""
        if self.key not in self.holder or self.holder[self.key] is not self.lent:
            return False  # replaced by something else, which is noted as such
        self.holder[self.key] = self.original
        if isinstance(self.lent, np.ndarray):
            return bool(self.lent.tobytes() != self.original.tobytes())
        return bool(self.lent._version)


def lend(holder: dict[Any, Any], key: Any, copies: dict[int, Any]) -> Loan:
    """Put a copy in the place of `holder[key]`, the same one wherever that is; see `can_lend`."""
    original = holder[key]
    copy = copies.setdefault(id(original), _copied(original))
    holder[key] = copy
    return Loan(holder, key, original, copy)


def can_lend(value: Any, shared: Callable[[], set[int]]) -> bool:
    """Whether nothing but a step's own code looks at what is in `value`.

    Args:
        shared: memory of parameters and buffers, see `memory_of`: not looked for unless a tensor may be in it.
    """
    if isinstance(value, np.ndarray):
        return value.flags.owndata and value.flags.writeable and value.dtype.kind in "biufc" and value.size <= _LARGE
    if type(value) is not Tensor or value.layout is not torch.strided or value.is_inference() or value.is_meta:
        return False
    if value.requires_grad or value._is_view() or value.numel() > _LARGE:
        return False
    return value.untyped_storage()._cdata not in shared()


def memory_of(module: Any) -> set[int]:
    """What tells apart the memory of parameters and buffers."""
    if not isinstance(module, nn.Module):
        return set()
    tensors = [item for item in (*module.parameters(), *module.buffers()) if type(item) in (Tensor, nn.Parameter)]
    return {item.untyped_storage()._cdata for item in tensors}


def write(original: Any, value: Any) -> None:
    """Put `value` into what was lent."""
    if isinstance(original, Tensor):
        with torch.no_grad():
            original.copy_(value)
    else:
        original[...] = value


def _copied(original: Any) -> Any:
    return original.detach().clone() if isinstance(original, Tensor) else original.copy()
