"""Private parts of Lightning: functions and classes of its launchers, and what a module knows of its run.

Read in Lightning 2.6.6.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.fabric.strategies.launchers import subprocess_script
from lightning.fabric.utilities import cloud_io, data, distributed, types
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.strategies import launchers
from lightning.pytorch.utilities import exceptions

ChildProcessObserver = subprocess_script._ChildProcessObserver
basic_subprocess_cmd = subprocess_script._basic_subprocess_cmd
is_local_file_protocol = cloud_io._is_local_file_protocol
set_sampler_epoch = data._set_sampler_epoch
default_process_group_backend = distributed._get_default_process_group_backend_for_device
init_dist_connection = distributed._init_dist_connection
set_num_threads_if_needed = distributed._set_num_threads_if_needed
Stateful = types._Stateful
Launcher = launchers.launcher._Launcher
MultiProcessingLauncher = launchers._MultiProcessingLauncher
SubprocessScriptLauncher = launchers._SubprocessScriptLauncher
TunerExitException = exceptions._TunerExitException
RUN = ("_trainer", "_fabric")
"""Attributes of a LightningModule that hold its run."""
HOLDERS = frozenset({"_modules", "_parameters", "_buffers", *RUN})
HPARAMS = ("_hparams", "_hparams_initial", "_hparams_name", "_log_hyperparams")
"""Attributes of a LightningModule that `save_hyperparameters` sets."""


def trainer_of(module: Any) -> Any:
    """The Trainer of a module, None outside of a run: the property raises there."""
    return getattr(module, "_trainer", None)


def logged_values(module: Any) -> dict[str, Any]:
    """The notes of `self.log`, which Lightning reads long after the hook that logged."""
    return getattr(trainer_of(module), "_results", None) or {}


def runs_of(module: Any) -> list[Any]:
    """References of a module to its run. These hold everything else, so a copy of the module leaves it out."""
    return [held for name in RUN if (held := vars(module).get(name)) is not None]


@contextmanager
def without_module_ranges(trainer: Any) -> Iterator[None]:
    """Remove the hooks by which `PyTorchProfiler` names modules in a trace inside, and put them back.

    Such a hook has open ranges of the trace, which nothing can copy, so a block with them cannot be run alone.
    """
    ranges = trainer.profiler._register if isinstance(trainer.profiler, PyTorchProfiler) else None
    if ranges is None:
        yield
        return
    ranges.__exit__(None, None, None)
    try:
        yield
    finally:
        ranges.__enter__()
