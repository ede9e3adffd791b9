"""Runs the user's script, unchanged, up to the end of its first `trainer.fit`."""

import runpy
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer

from lightning_3d.dryrun.cluster import in_world
from lightning_3d.dryrun.report import DryRunReport
from lightning_3d.errors import ConfigurationError
from lightning_3d.planner.hardware import Cluster


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
    with in_world(cluster) as world, _command_line(script, words), _fit_is_the_end():
        world.ranks = ranks
        try:
            runpy.run_path(str(script), run_name="__main__")
        except _FitIsOver:
            return world.reports[0]
        except SystemExit as stop:
            raise ConfigurationError(
                f"{script} called sys.exit({stop.code!r}) before its trainer.fit ended, so there is nothing to show."
                " Give the script's own arguments with --args."
            ) from stop
    raise ConfigurationError(f"{script} ended without a call of trainer.fit, so there is nothing to show.")


class _FitIsOver(BaseException):
    """Ends the script. A BaseException: `except Exception` in the script does not catch it."""


@contextmanager
def _fit_is_the_end() -> Iterator[None]:
    """End the script after `fit`: code after it needs a trained module, and there is none."""
    fit = Trainer.fit

    @wraps(fit)
    def fit_and_end(trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        fit(trainer, *args, **kwargs)
        raise _FitIsOver

    Trainer.fit = fit_and_end  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Trainer.fit = fit  # type: ignore[method-assign]


@contextmanager
def _command_line(script: Path, arguments: list[str]) -> Iterator[None]:
    before = sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before
