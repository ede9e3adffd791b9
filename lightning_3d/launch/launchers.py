"""Removes the traces of a job from the process that launched it, so that the next job starts from nothing.

Runs the user's script once more for each other process, as Lightning does, but right inside of Hydra's sweeps.

Lightning's launcher for processes that are spawned or forked, with our guard around what they run.
"""

import atexit
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hydra.utils import to_absolute_path
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import distributed as dist

from lightning_3d.errors import RunError
from lightning_3d.launch.hydra_job import check_launcher, child_command, is_sweep, running_job
from lightning_3d.launch.lightning_private import (
    ChildProcessObserver,
    MultiProcessingLauncher,
    SubprocessScriptLauncher,
    basic_subprocess_cmd,
    set_num_threads_if_needed,
)

NAMES = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
"""Variables that Lightning sets when it starts processes; what is there later it takes for the user's."""
AT_START = {name: os.environ.get(name) for name in NAMES}
PATIENCE = 60.0
"""Seconds that the other processes of a job which ended well have to end too."""
PATIENCE_AFTER_ERROR = 10.0


class SweepJob:
    """The job of a sweep whose processes this one started."""

    def __init__(self) -> None:
        self.job: object | None = None
        self.children: Sequence[subprocess.Popen[bytes]] = ()
        self.failed = False

    def start(self, job: object | None, children: Sequence[subprocess.Popen[bytes]]) -> None:
        self.job, self.children, self.failed = job, children, False
        atexit.register(self.end)

    def clear_before(self, job: object | None) -> None:
        """End the processes and the process group of an earlier job, unless `job` is still that one."""
        if self.job is job:
            return
        self.end()
        if dist.is_initialized():
            dist.destroy_process_group()
        _set_environment(AT_START)

    def end(self) -> None:
        """Wait for the children; kill those that do not end."""
        deadline = time.monotonic() + (PATIENCE_AFTER_ERROR if self.failed else PATIENCE)
        late = [child for child in self.children if not _ended(child, deadline)]
        for child in late:
            child.kill()
            child.wait()
        if late and not self.failed:
            rank_zero_warn(
                f"{len(late)} processes of a finished job were still running after {PATIENCE:.0f} s and were killed."
            )
        self.job, self.children = None, ()
        atexit.unregister(self.end)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _ended(child: "subprocess.Popen[bytes]", deadline: float) -> bool:
    try:
        child.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


launched = SweepJob()
"""One per process, as the environment and the process group that it cleans are."""
Guard = Callable[..., Any]
"""Calls a function, and may replace its error by one that explains more."""
LAST_WORDS = 15.0
"""Seconds for the other processes to report what happened, once one has failed."""


class ScriptLauncher(SubprocessScriptLauncher):
    """Lightning's launcher, except in a Hydra job.

    There a child is a single run with the overrides and the directory of this job. A child that repeated the command
    line would run the full sweep again, and a random sweeper would give it other parameters. Ranks and port in the
    environment, the process group and the processes of the last job are removed before the next job starts.
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
        before = {name: os.environ.get(name) for name in NAMES}
        starts = not self.cluster_environment.creates_processes_externally
        if starts:
            self._call_children_scripts()
            if self._sweep:
                launched.start(running_job(), self.procs)
            (_SweepObserver if self._sweep else _Observer)(self.procs).start()
        set_num_threads_if_needed(num_processes=self.num_processes)
        try:
            return self._guard(function, *args, **kwargs)
        except BaseException:
            launched.failed = self._sweep
            raise
        finally:
            if starts and not self.procs:  # a later Trainer of several processes is to start them
                _set_environment(before)

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


class _Observer(ChildProcessObserver):
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


def can_run_again() -> bool:
    """Return True if there is a script: not in a notebook, at a prompt, or in what `python -c` or a pipe was given."""
    import __main__

    named = __main__.__spec__ is not None or Path(to_absolute_path(sys.argv[0])).is_file()
    return named and not hasattr(sys, "ps1")


def _program() -> Sequence[str]:
    import __main__  # what it is depends on how this process was started, so not at the top

    if __main__.__spec__ is None:
        return [sys.executable, to_absolute_path(sys.argv[0])]
    return basic_subprocess_cmd()[:3]


class SpawnLauncher(MultiProcessingLauncher):
    """As Lightning's; `guard` calls the function in every process."""

    def __init__(self, strategy: Any, start_method: Any, guard: Guard) -> None:
        super().__init__(strategy, start_method=start_method)
        self._guard = guard

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        return super().launch(partial(self._call, function), *args, trainer=trainer, **kwargs)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        torch.set_num_threads(torch.get_num_threads())  # a fork's pool is made anew here: two threads at once abort
        try:
            return self._guard(*args, **kwargs)
        except SystemExit as end:  # the process that forked this one would wait for a result without end
            raise RunError(f"this rank ended by {end!r}, and with it the run that was forked or spawned.") from end

    def get_extra_results(self, trainer: Trainer) -> dict[str, Any]:
        strategy: Any = trainer.strategy
        names = [name for name, _ in trainer.lightning_module.named_parameters()]
        return {**super().get_extra_results(trainer), "measured": pickle.dumps(strategy.measured), "names": names}

    def update_main_process_results(self, trainer: Trainer, extra: dict[str, Any]) -> None:
        super().update_main_process_results(trainer, extra)
        strategy: Any = trainer.strategy
        strategy.measured = pickle.loads(extra["measured"])  # else None where `fit` was called, as in a notebook
        here = {name for name, _ in trainer.lightning_module.named_parameters()}
        missing = [name for name in extra["names"] if name not in here]
        if missing and trainer.state.fn == TrainerFn.FITTING:
            kind = type(trainer.lightning_module).__name__
            rank_zero_warn(
                f"{kind} has no {missing[0]} in this process ({len(missing)} parameters in all): forked processes built"
                " them in configure_model and have ended. Call module.configure_model() before trainer.fit, and the"
                f" trained weights are here after it. Or load a checkpoint: {kind}.load_from_checkpoint(path)."
            )
