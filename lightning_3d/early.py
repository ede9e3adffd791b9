"""Optimizers for a step that runs before the Trainer has made its own: many steps log a learning rate.

Touches two private names of Lightning's Strategy (read in 2.6): `_optimizers` and `_lightning_optimizers`;
`tests/test_early.py` fails when they change.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer

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
