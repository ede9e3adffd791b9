"""Trainers on a simulated cluster: those of a script, or the one that gets `Strategy3D(dry_run=...)`."""

import runpy
import shlex
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import Trainer
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.hooks import RemovableHandle

from lightning_3d.errors import ConfigurationError
from lightning_3d.extensions import simulating
from lightning_3d.tools.dryrun.cluster import (
    FakeClusterEnvironment,
    World,
    apply_to_fakes,
    ignore_pointers,
    parse_cluster,
)
from lightning_3d.tools.dryrun.launcher import DryLauncher
from lightning_3d.tools.dryrun.report import DryRunReport
from lightning_3d.tools.planner.hardware import Cluster
from lightning_3d.tools.planner.module_source import FitReached


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
    handle: RemovableHandle = register_module_parameter_registration_hook(
        lambda module, name, parameter: None if parameter is None else world.fake_parameter(parameter)  # type: ignore[arg-type, return-value]
    )
    simulating.append(launcher := DryLauncher(world))
    on_cluster = patch.object(Trainer, "__init__", _on_cluster(Trainer.__init__, world))
    try:
        with on_cluster, patch.object(nn.Module, "_apply", apply_to_fakes(nn.Module._apply)), warnings.catch_warnings():
            ignore_pointers()
            yield world
    finally:
        simulating.remove(launcher)
        handle.remove()


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
    """The report of a dry run of `script` on `cluster`.

    Args:
        script: run as `python script arguments` would, in this process, until its `fit` is over.
        cluster: overrides the devices and nodes that its Trainer asks for.
        arguments: its command line.
        ranks: ranks to simulate; None for one of each pipeline stage, the last, and the middle of each axis.
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
