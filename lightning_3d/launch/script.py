"""Runs the user's script once more for each other process, as Lightning does, but right inside of Hydra's sweeps."""

import atexit
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from hydra.utils import to_absolute_path
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

# private to Lightning, read in 2.6.6
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd, _ChildProcessObserver
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.pytorch import Trainer
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from lightning_3d.launch.hydra_job import check_launcher, child_command, is_sweep, running_job
from lightning_3d.launch.leftovers import launched

Guard = Callable[..., Any]
"""Calls the function it is given; what that raises it may replace by an error that says more."""
LAST_WORDS = 15.0
"""Seconds that the other processes get to say what happened, once one has failed."""


class ScriptLauncher(_SubprocessScriptLauncher):
    """Lightning's launcher, except in a Hydra job.

    There a child is a single run with the overrides of this very job in this job's directory (a child that repeated the
    command line would walk the whole sweep again, elsewhere, and a random sweeper would give it other parameters), and
    what the job before left in this process (ranks and port in the environment, the process group, processes) is gone
    before the next one starts.
    """

    def __init__(
        self, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int, guard: Guard
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._guard = guard
        self._sweep = isinstance(cluster_environment, LightningEnvironment) and is_sweep()
        if self._sweep:
            launched.clear_before(running_job())
        if running_job() is not None and num_processes > 1 and not cluster_environment.creates_processes_externally:
            check_launcher(num_processes)

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Start the other processes if nothing did, then call `function`."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        if not self.cluster_environment.creates_processes_externally:
            self._call_children_scripts()
            if self._sweep:
                launched.start(running_job(), self.procs)
            (_SweepObserver if self._sweep else _Observer)(self.procs).start()
        _set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return self._guard(function, *args, **kwargs)
        except BaseException:
            launched.failed = self._sweep
            raise

    def _call_children_scripts(self) -> None:
        if running_job() is None:
            super()._call_children_scripts()
            return
        self._check_can_spawn_children()
        environment = self.cluster_environment
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
        os.environ["NODE_RANK"], os.environ["LOCAL_RANK"] = str(environment.node_rank()), str(environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        for local_rank in range(1, self.num_processes):
            command, directory = child_command(_program(), local_rank)
            child = subprocess.Popen(command, env={**os.environ, "LOCAL_RANK": str(local_rank)}, cwd=directory)
            self.procs.append(child)


class _Observer(_ChildProcessObserver):
    """Kills the other processes once one has failed, but not before they could say why."""

    def __init__(self, children: "list[subprocess.Popen[bytes]]") -> None:
        super().__init__(main_pid=os.getpid(), child_processes=children, sleep_period=1)

    def _terminate_all(self) -> None:
        time.sleep(LAST_WORDS)
        super()._terminate_all()


class _SweepObserver(_Observer):
    """Leaves this process, which has more jobs to run.

    It fails in its next collective, as the peers are gone, and so reports the job as failed.
    """

    def _terminate_all(self) -> None:
        for child in self._child_processes:
            child.kill()


def _program() -> Sequence[str]:
    import __main__  # what it is depends on how this process was started, so not at the top

    if __main__.__spec__ is None:
        return [sys.executable, to_absolute_path(sys.argv[0])]
    return _basic_subprocess_cmd()[:3]


atexit.register(launched.end)
