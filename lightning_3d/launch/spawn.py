"""Lightning's launcher for processes that are spawned or forked, with our guard around what they run."""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from lightning_3d.launch.script import Guard


class SpawnLauncher(_MultiProcessingLauncher):
    """As Lightning's; `guard` calls the function in every process."""

    def __init__(self, strategy: Any, start_method: Any, guard: Guard) -> None:
        super().__init__(strategy, start_method=start_method)
        self._guard = guard

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        return super().launch(partial(self._guard, function), *args, trainer=trainer, **kwargs)
