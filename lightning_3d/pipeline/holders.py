"""What a step that runs ahead of training could leave behind: on modules, and on the user's objects that they keep."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_3d.pipeline.attributes import own

_LIBRARIES = sys.stdlib_module_names | {"lightning", "lightning_3d", "numpy", "torch", "torchmetrics"}
"""Their objects (queues, optimizers, loggers) are not the user's; metrics are put back by who runs the step."""

_MANY, _LARGE = 100, 10_000_000
"""Entries of a container, and elements, beyond which it is data, that no step changes."""


def holders(module: nn.Module) -> Iterator[Any]:
    """The modules, and the objects of other classes that are reached from their attributes."""
    seen = set[int]()
    waiting: list[Any] = list(module.modules())
    while waiting:
        holder = waiting.pop()
        if id(holder) not in seen:
            seen.add(id(holder))
            yield holder
            waiting += [item for value in own(holder).values() for item in _inside(value) if _is_users(item)]


@contextmanager
def contents_kept(holder: Any) -> Iterator[None]:
    """Undo what the code inside writes into tensors and arrays that `holder` has (`self.confusion[y, p] += 1`)."""
    found = [item for value in own(holder).values() for item in _inside(value)]
    tensors = [(item, item._version, item.detach().clone()) for item in found if _is_plain_tensor(item)]
    arrays = [(item, item.copy()) for item in found if _is_own_array(item)]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, version, copy in tensors:
                if tensor._version != version:
                    tensor.copy_(copy)
        for array, content in arrays:
            array[...] = content


def _inside(value: Any) -> Iterator[Any]:
    """What a container holds, and those in it."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else None
    if inner is None:
        yield value
    elif len(inner) <= _MANY:
        for item in inner:
            yield from _inside(item)


def _is_users(value: Any) -> bool:
    kind = type(value)
    library = kind.__module__.partition(".")[0] in _LIBRARIES
    return hasattr(value, "__dict__") and not library and not isinstance(value, nn.Module | type)


def _is_plain_tensor(value: Any) -> bool:
    plain = type(value) is Tensor and value.layout is torch.strided and not value.is_inference()
    return plain and value.numel() <= _LARGE


def _is_own_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.flags.writeable and value.size <= _LARGE
