"""Trainers on a simulated cluster: those of a script, or the one that gets `Strategy3D(dry_run=...)`.

`DryLauncher`: instead of starting processes, simulate some ranks of the cluster and print their reports.
"""

import os
import runpy
import shlex
import sys
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from lightning_3d.errors import ConfigurationError, LayoutError
from lightning_3d.extensions import simulating
from lightning_3d.launch.lightning_private import Launcher
from lightning_3d.layout import PIPELINE_AXIS, Layout
from lightning_3d.ranks.process_groups_private import existing_groups
from lightning_3d.tools.dryrun.cluster import (
    FakeClusterEnvironment,
    World,
    apply_to_fakes,
    chosen_layout,
    no_pointers,
    parse_cluster,
)
from lightning_3d.tools.dryrun.report import DryRunReport, RankReport
from lightning_3d.tools.dryrun.simulated_rank import SimulatedRank
from lightning_3d.tools.planner.hardware import Cluster
from lightning_3d.tools.planner.module_source import FitReached


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
        kinds = _in_host_memory(layout, strategy.settings.offloads_states)
        peaks = [max(0, rank.peak - sum(getattr(rank, kind) for kind in kinds)) for rank in reports]
        placed = [
            replace(rank, where=str(layout.coordinate(rank.rank)), offloaded=kinds, peak=peak)
            for rank, peak in zip(reports, peaks, strict=True)
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


def dry_launcher(strategy: object, cluster: str) -> DryLauncher:
    """Simulate the one Trainer that gets `strategy`. The caller's module is not changed."""
    world, before, owner = World(parse_cluster(cluster)), Trainer.__init__, weakref.ref(strategy)
    dry = _on_cluster(before, world)

    def init(trainer: Trainer, *args: Any, **flags: Any) -> None:
        dry_strategy = owner()  # None once it is gone, as is the `strategy` of a Trainer that is given none
        if dry_strategy is None or flags.get("strategy") is not dry_strategy:
            before(trainer, *args, **flags)
            return
        if Trainer.__init__ is init:
            Trainer.__init__ = before  # type: ignore[method-assign]
        dry(trainer, *args, **flags)

    Trainer.__init__ = wraps(before)(init)  # type: ignore[method-assign, assignment]
    return DryLauncher(world)


@contextmanager
def in_world(cluster: Cluster) -> Iterator[World]:
    """Inside, Trainers run on the simulated `cluster`, and modules are built without memory for parameters."""
    world = World(cluster)
    world.quiet = True
    fakes: RemovableHandle = register_module_parameter_registration_hook(
        lambda module, name, parameter: None if parameter is None else world.fake_parameter(parameter)  # type: ignore[arg-type, return-value]
    )
    simulating.append(launcher := DryLauncher(world))
    on_cluster = patch.object(Trainer, "__init__", _on_cluster(Trainer.__init__, world))
    moved = patch.object(nn.Module, "_apply", apply_to_fakes(nn.Module._apply))
    try:
        with fakes, world.kept_classes(), on_cluster, moved, warnings.catch_warnings():
            no_pointers()
            yield world
    finally:
        simulating.remove(launcher)


def _on_cluster(init: Any, world: World) -> Any:
    """`Trainer.__init__` with the devices of the cluster in place of those that the script asks for."""

    @wraps(init)
    def on_cluster(trainer: Trainer, *args: Any, **flags: Any) -> None:
        given = flags.get("plugins") or []
        plugins = [p for p in (given if isinstance(given, list) else [given]) if not isinstance(p, ClusterEnvironment)]
        flags.update(
            accelerator="cpu",
            devices=world.cluster.devices_per_node,
            num_nodes=world.cluster.nodes,
            plugins=[*plugins, FakeClusterEnvironment(world)],
        )
        init(trainer, *args, **flags)
        if not hasattr(type(trainer.strategy), "coordinate"):
            raise ConfigurationError(
                f"the script's Trainer has strategy={type(trainer.strategy).__name__}: a dry run simulates Strategy3D"
                ' only. Give the Trainer strategy=Strategy3D(...), or a name such as "3d_zero1".'
            )

    return on_cluster


def dry_run_script(
    script: Path, cluster: Cluster, *, arguments: str = "", ranks: Sequence[int] | None = None
) -> DryRunReport:
    """The report of a dry run of `script` on `cluster`, in this process, until its `fit` is over.

    Without `ranks`, one of each pipeline stage is simulated, the last, and the middle of each axis.
    """
    if not script.is_file():
        raise ConfigurationError(f"there is no script {script}.")
    try:
        words = shlex.split(arguments)
    except ValueError as error:
        raise ConfigurationError(f"--args {arguments!r} cannot be split into words: {error}.") from error
    fit = Trainer.fit

    @wraps(fit)
    def fit_and_end(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        fit(trainer, *args, **kwargs)
        raise FitReached  # code after it needs a trained module, and there is none

    paths = [str(script.resolve().parent), *sys.path]
    with patch.object(sys, "argv", [str(script), *words]), patch.object(sys, "path", paths):
        with in_world(cluster) as world, patch.object(Trainer, "fit", fit_and_end):
            world.ranks = ranks
            try:
                runpy.run_path(str(script), run_name="__main__")
            except FitReached:
                return world.reports[0]
            except SystemExit as stop:
                raise ConfigurationError(
                    f"{script} called sys.exit({stop.code!r}) before its trainer.fit ended, so there is nothing to"
                    " show. Give the script's own arguments with --args."
                ) from stop
    raise ConfigurationError(f"{script} ended without a call of trainer.fit, so there is nothing to show.")
