"""Another `step` in the place of an optimizer's own."""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch.optim import Optimizer


def replace_step(optimizer: Optimizer, step: Callable[..., Any]) -> Callable[[], None]:
    """Have `optimizer.step(...)` call `step(optimizer, ...)`; returns what undoes it."""
    original = optimizer.step
    step.__dict__.update(getattr(original, "__dict__", {}))  # schedulers mark the step they have wrapped
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]

    def undo() -> None:
        optimizer.step = original  # type: ignore[method-assign]

    return undo
