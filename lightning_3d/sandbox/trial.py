"""Optimizers for a step that runs before the Trainer has made its own: many steps log a learning rate.

Touches two private names of Lightning's Strategy (read in 2.6): `_optimizers` and `_lightning_optimizers`;
`tests/test_early.py` fails when they change.

What a step that runs ahead of training could leave behind: on modules, and on the user's objects that they keep.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_3d.sandbox.snapshot import Attributes, own, undone

if TYPE_CHECKING:
    pass

HELD = ("_optimizers", "_lightning_optimizers", "lr_scheduler_configs")


@contextmanager
def optimizers_on_demand(module: LightningModule) -> Iterator[None]:
    """The first look at the Trainer's optimizers or schedulers calls `configure_optimizers`; forgotten afterwards.

    Not where the module keeps an optimizer: schedulers that are built on it twice would change its learning rate twice.
    """
    trainer = getattr(module, "_trainer", None)  # the property raises where a module has none
    kept = any(isinstance(value, Optimizer) for value in vars(module).values())
    if trainer is None or trainer.state.fn != TrainerFn.FITTING or trainer.optimizers or kept:
        yield
        return
    holder: Any = trainer.strategy
    before = {name: vars(holder)[name] for name in HELD}

    def make(name: str) -> Sequence[Any]:
        vars(holder).update(before)
        Strategy.setup_optimizers(holder, trainer)
        return list(vars(holder)[name])

    vars(holder).update({name: _OnDemand(partial(make, name)) for name in HELD})
    try:
        yield
    finally:
        vars(holder).update(before)


class _OnDemand(list[Any]):  # Lightning asks whether it is a list
    """A list that is filled when it is first looked into."""

    def __init__(self, make: Callable[[], Sequence[Any]]) -> None:
        super().__init__()
        self._make: Callable[[], Sequence[Any]] | None = make

    def _fill(self) -> None:
        if self._make is not None:
            make, self._make = self._make, None
            self.extend(make())

    def __len__(self) -> int:
        self._fill()
        return super().__len__()

    def __iter__(self) -> Iterator[Any]:
        self._fill()
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self._fill()
        return super().__getitem__(index)


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
def contents_restored(holder: Any) -> Iterator[None]:
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


@contextmanager
def state_restored(module: Any) -> Iterator[None]:
    """Put back buffers and plain attributes that a step changes, also those of objects that the user keeps (meters).

    Tensors too: a result that a block leaves on itself would look to a later block of another stage like the one that
    its own step leaves.
    """
    buffers = [name for name, buffer in module.named_buffers(remove_duplicate=False) if not buffer.is_meta]
    with ExitStack() as stack:
        for holder in holders(module):
            stack.enter_context(contents_restored(holder))
            stack.enter_context(Attributes(holder).apart())
        stack.enter_context(undone(module, buffers))
        yield
