"""`DryLauncher`: instead of starting processes, simulate some ranks of the cluster and print their reports."""

import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn

from lightning_3d.errors import LayoutError
from lightning_3d.launch.lightning_private import Launcher
from lightning_3d.layout import PIPELINE_AXIS, Layout
from lightning_3d.ranks.inherited_groups_private import existing_groups
from lightning_3d.tools.dryrun.cluster import World
from lightning_3d.tools.dryrun.lone_rank import chosen_layout
from lightning_3d.tools.dryrun.report import DryRunReport, RankReport
from lightning_3d.tools.dryrun.simulated_rank import SimulatedRank


class DryLauncher(Launcher):
    """Runs the launched function once for each chosen rank, in processes forked from this one."""

    def __init__(self, world: World) -> None:
        self.world = world

    @property
    def is_interactive_compatible(self) -> bool:
        return True

    def kill(self, signum: Any) -> None:
        """Do nothing: `launch` waits for every simulated rank."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Simulate `function` and show the report. Its results are discarded."""
        assert trainer is not None
        assert trainer.state.fn is not None
        if trainer.state.fn != TrainerFn.FITTING:
            warnings.warn(
                f"trainer.{trainer.state.fn.value} is skipped: a dry run simulates trainer.fit only.", stacklevel=2
            )
            return []
        report = self._simulate(trainer, lambda: function(*args, **kwargs), args[0] if args else kwargs["model"])
        self.world.reports.append(report)
        self.world.show(report)
        return None

    def _simulate(self, trainer: Trainer, fit: Callable[[], Any], module: Any) -> DryRunReport:
        strategy: Any = trainer.strategy
        try:
            layout: Layout = strategy.layout
        except LayoutError as error:
            failed = RankReport(rank=0, where="every rank", error=f"LayoutError: {error}")
            return DryRunReport(cluster=self.world.cluster, layout="none", ranks=(failed,))
        asked, why = list(self.world.ranks or ()), ""
        reports: list[RankReport] = []
        with tempfile.NamedTemporaryFile() as file:
            self.world.decisions = file.name
            if strategy.sizes.auto is not None:  # the first rank chooses the layout, and so the stages
                reports = self._run(asked[:1] or [0], trainer, module, fit)
                layout, why = chosen_layout(file.name) or (layout, "")
            rest = [rank for rank in asked or usual_ranks(layout) if rank not in {done.rank for done in reports}]
            if all(done.error is None for done in reports):
                reports += self._run(rest, trainer, module, fit)
        placed = [replace(rank, where=str(layout.coordinate(rank.rank))) for rank in reports]
        kinds = _in_host_memory(layout, strategy.settings.offloads_states)
        placed = [
            replace(rank, offloaded=kinds, peak=max(0, rank.peak - sum(getattr(rank, kind) for kind in kinds)))
            for rank in placed
        ]
        if (resume := strategy.settings.resume) is not None:
            warnings.warn(
                f"resume={resume!r} is ignored in a dry run, which shows a run from the start. A resumed run"
                " keeps its global batch: on another number of ranks its layout may differ from the one shown.",
                stacklevel=2,
            )
        return DryRunReport(cluster=self.world.cluster, layout=str(layout), ranks=tuple(placed), chosen=why)

    def _run(self, ranks: list[int], trainer: Trainer, module: Any, fit: Callable[[], Any]) -> list[RankReport]:
        """The reports of `ranks`, simulated as many at a time as there are cores."""
        reports: list[RankReport] = []
        running: list[SimulatedRank] = []
        inherited = existing_groups()  # none may end in a simulated rank
        try:
            while ranks or running:
                while ranks and len(running) < (os.cpu_count() or 1):
                    running.append(SimulatedRank(self.world, ranks.pop(0), trainer, module, fit))
                reports.append(running[0].report())
                running.pop(0)
        except BaseException:
            for rank in running:
                rank.kill()
            raise
        del inherited
        return reports


def _in_host_memory(layout: Layout, states: bool) -> tuple[str, ...]:
    """Kinds of states that leave the device: a pipeline has gathered weights and full gradients for its step."""
    if layout.offload == "all" and not layout.pipelined:
        return ("parameters", "gradients", "optimizer")
    return ("optimizer",) if states or layout.offload == "all" else ()


def usual_ranks(layout: Layout) -> Sequence[int]:
    """The first rank of each pipeline rank, whose shards are the largest; of the others the last, and
    one in the middle of each axis, since user code may differ by rank."""
    first = [{PIPELINE_AXIS: at} for at in range(layout.sizes[PIPELINE_AXIS])]
    odd = [{axis: size // 2} for axis, size in layout.sizes.items() if axis != PIPELINE_AXIS]
    return sorted({*map(layout.rank, [*first, *odd]), layout.world_size - 1})
