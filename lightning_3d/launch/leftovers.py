"""What a job leaves in the process that launched it, so that the next job in the same process starts from nothing."""

import os
import subprocess
import time
from collections.abc import Sequence

from lightning.pytorch.utilities import rank_zero_warn
from torch import distributed as dist

NAMES = (
    "LOCAL_RANK",
    "NODE_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)
"""Variables that Lightning sets when it starts processes; what is there later it takes for the user's."""
AT_START = {name: os.environ.get(name) for name in NAMES}
PATIENCE = 60.0
"""Seconds that the other processes of a job which ended well have to end too."""
PATIENCE_AFTER_ERROR = 10.0


class Launched:
    """The job of a sweep whose processes this one started."""

    def __init__(self) -> None:
        self.job: object | None = None
        self.children: Sequence[subprocess.Popen[bytes]] = ()
        self.failed = False

    def start(self, job: object | None, children: Sequence[subprocess.Popen[bytes]]) -> None:
        self.job, self.children, self.failed = job, children, False

    def clear_before(self, job: object | None) -> None:
        """End what an earlier job left, unless `job` is still the one that left it."""
        if self.job is job:
            return
        self.end()
        if dist.is_initialized():
            dist.destroy_process_group()
        for name, value in AT_START.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

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


def _ended(child: "subprocess.Popen[bytes]", deadline: float) -> bool:
    try:
        child.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


launched = Launched()
"""One per process, as the environment and the process group that it cleans are."""
