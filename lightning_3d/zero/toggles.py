"""`toggle_optimizer` in the middle of a step, where the module has gathered parameters and the optimizers their shards.

It sets on the optimizers' parameters which of them get gradients. FSDP2 asks these when it gathers, which for a step of
several backwards is before the first of them.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

_TOGGLES = ("toggle_optimizer", "untoggle_optimizer")


def follow_toggles(module: nn.Module, follow: Callable[[], None]) -> Callable[[], None]:
    """Call `follow` after each toggle; returns what undoes it."""
    if getattr(module, "automatic_optimization", True):
        return lambda: None

    def followed(name: str) -> Callable[..., None]:
        original = getattr(module, name)

        def toggle(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            follow()

        return toggle

    vars(module).update({name: followed(name) for name in _TOGGLES})

    def undo() -> None:
        for name in _TOGGLES:
            del vars(module)[name]

    return undo
