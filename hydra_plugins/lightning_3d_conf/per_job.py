"""submitit's launchers, except that each job gets the processes its own Trainer asks for.

They take the sizes of a sweep's jobs from its common configuration once, so that of `trainer.devices=2,4` one would
wait for ranks that nobody starts. Here each job is submitted by itself, with sizes from its own configuration.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from importlib.util import find_spec
from typing import Any

SIZES = ("nodes", "tasks_per_node", "gpus_per_node", "cpus_per_task")

if find_spec("hydra_plugins.hydra_submitit_launcher") is not None:  # every Hydra program reads this file
    from hydra_plugins.hydra_submitit_launcher.submitit_launcher import LocalLauncher, SlurmLauncher

    class SlurmPerJob(SlurmLauncher):
        """Jobs side by side on Slurm, `array_parallelism` of them at most."""

        def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[Any]:
            at_once = min(len(job_overrides), int(self.params["array_parallelism"]))
            return _each(super().launch, self, job_overrides, initial_job_idx, at_once)

    class LocalPerJob(LocalLauncher):
        """Jobs one after the other on this machine."""

        def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[Any]:
            return _each(super().launch, self, job_overrides, initial_job_idx, at_once=1)


def _each(launch: Any, launcher: Any, job_overrides: Sequence[Sequence[str]], first: int, at_once: int) -> list[Any]:
    """What `launch` returns for every job. A job that fails is raised once all have ended."""
    loader = launcher.hydra_context.config_loader
    sizes = [loader.load_sweep_config(launcher.config, list(overrides)).hydra.launcher for overrides in job_overrides]

    def submit(number: int) -> Any:
        one = copy(launcher)
        one.params = {**launcher.params, **{name: sizes[number][name] for name in SIZES if name in sizes[number]}}
        return launch.__func__(one, [job_overrides[number]], first + number)[0]

    with ThreadPoolExecutor(at_once) as threads:
        jobs = [threads.submit(submit, number) for number in range(len(job_overrides))]
    return [job.result() for job in jobs]
