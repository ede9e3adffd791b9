"""The processes that submitit's local executor starts: the Slurm recipe, tried on one machine.

On Slurm itself submitit's tasks are those of `srun`, which Lightning knows.
"""

import os

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment

from lightning_3d.errors import LayoutError

FIRST_PORT, PORTS = 12_000, 20_000
"""Below the range from which Linux gives out ports by itself."""


class SubmititLocalEnvironment(ClusterEnvironment):
    """One task of a job that submitit runs on this machine; it gave each task its number (read in submitit 1.5)."""

    @staticmethod
    def detect() -> bool:
        return os.environ.get("SUBMITIT_EXECUTOR") == "local" and "SUBMITIT_LOCAL_GLOBALID" in os.environ

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    def main_port(self) -> int:
        """The same for all tasks of a job, and another for each job that runs now: a job's number is a process id."""
        return FIRST_PORT + int(os.environ["SUBMITIT_LOCAL_JOB_ID"]) % PORTS

    def world_size(self) -> int:
        return int(os.environ["SUBMITIT_LOCAL_NTASKS"])

    def set_world_size(self, size: int) -> None:
        """submitit decides it."""

    def global_rank(self) -> int:
        return int(os.environ["SUBMITIT_LOCAL_GLOBALID"])

    def set_global_rank(self, rank: int) -> None:
        """submitit decides it."""

    def local_rank(self) -> int:
        return int(os.environ["SUBMITIT_LOCAL_LOCALID"])

    def node_rank(self) -> int:
        return 0

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        if num_devices * num_nodes != self.world_size():
            raise LayoutError(
                f"submitit started {self.world_size()} tasks, and the Trainer wants {num_devices} devices x {num_nodes}"
                " nodes. Use +launcher=submitit_local, which takes the number from trainer.devices, or set"
                f" hydra.launcher.tasks_per_node={num_devices} and trainer.num_nodes=1."
            )


def joined(environment: ClusterEnvironment | None) -> ClusterEnvironment | None:
    """`environment`, or what Lightning took for a single process that is to start the others."""
    if isinstance(environment, LightningEnvironment) and SubmititLocalEnvironment.detect():
        return SubmititLocalEnvironment()
    return environment
