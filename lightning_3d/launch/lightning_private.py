"""Private functions and classes of Lightning that this package imports. Read in Lightning 2.6.6.

`tests/test_private_names.py` fails with their names when Lightning no longer has them.
"""

from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd as basic_subprocess_cmd
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver as ChildProcessObserver
from lightning.fabric.utilities.cloud_io import _is_local_file_protocol as is_local_file_protocol
from lightning.fabric.utilities.data import _set_sampler_epoch as set_sampler_epoch
from lightning.fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device as default_process_group_backend,
)
from lightning.fabric.utilities.distributed import _init_dist_connection as init_dist_connection
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed as set_num_threads_if_needed
from lightning.fabric.utilities.types import _Stateful as Stateful
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher as MultiProcessingLauncher
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher as SubprocessScriptLauncher
from lightning.pytorch.strategies.launchers.launcher import _Launcher as Launcher
from lightning.pytorch.utilities.exceptions import _TunerExitException as TunerExitException

__all__ = [
    "ChildProcessObserver",
    "Launcher",
    "MultiProcessingLauncher",
    "Stateful",
    "SubprocessScriptLauncher",
    "TunerExitException",
    "basic_subprocess_cmd",
    "default_process_group_backend",
    "init_dist_connection",
    "is_local_file_protocol",
    "set_num_threads_if_needed",
    "set_sampler_epoch",
]
