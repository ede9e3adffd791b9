"""`toggle_optimizer` in the middle of a step, where the module has gathered parameters and the optimizers their shards.

It sets on the optimizers' parameters which of them get gradients. FSDP2 asks these when it gathers, which for a step of
several backwards is before the first of them.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_3d.module.undo import UndoStack

_TOGGLES = ("toggle_optimizer", "untoggle_optimizer")


def follow_toggles(module: nn.Module, follow: Callable[[], None], undo: UndoStack) -> None:
    """Call `follow` after each toggle. `undo` takes the way back."""
    if getattr(module, "automatic_optimization", True):
        return

    def followed(name: str) -> Callable[..., None]:
        original = getattr(module, name)

        def toggle(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            follow()

        return toggle

    for name in _TOGGLES:
        undo.set(module, name, followed(name))
