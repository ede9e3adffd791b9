"""Tools in a run. The core imports no tool: it loads one when a run asks for it by name."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

from lightning.pytorch import LightningModule, Trainer

from lightning_3d.launch.lightning_private import Launcher
from lightning_3d.layout import Layout

HOMES = {
    "device peak": "lightning_3d.tools.planner.local_cluster:device_peak",
    "dry run": "lightning_3d.tools.dryrun.simulation:dry_launcher",
    "layout chooser": "lightning_3d.tools.auto_layout:layout_chooser",
}
simulating: list[Launcher] = []
"""Launchers of the dry runs of whole scripts, the innermost last. All Trainers use that one."""


def load(tool: str) -> Callable[..., Any]:
    module, name = HOMES[tool].split(":")
    return getattr(import_module(module), name)


class LayoutChooser(Protocol):
    """Chooses the layout of a run from its module and its data."""

    chosen: Layout | None
    data: int | None
    """Data ranks with which a run that is resumed keeps its global batch."""

    def layout(self, world_size: int) -> Layout:
        """The choice, or a first guess before it."""

    def choose(
        self, trainer: Trainer, module: LightningModule, processes: Any, to_device: Callable[[Any], Any]
    ) -> None:
        """Choose and say it. Every rank calls it."""

    def data_sizes(self, world_size: int) -> list[int]:
        """Data ranks that a choice could have, most first."""
