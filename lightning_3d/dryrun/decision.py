"""What is decided on the whole module before it is placed: found out by one simulated rank, for all."""

import fcntl
import pickle
from typing import Any

# private to torch, read in 2.13
from torch.utils._python_dispatch import _disable_current_modes

from lightning_3d.compose import Plans
from lightning_3d.dryrun.pretend import Memory
from lightning_3d.place import make_plans
from lightning_3d.tensor.infer import plan_tensor


class Decision:
    """The plans of the first simulated rank that comes. The others wait for it, as real ranks do for rank 0.

    Every rank runs the whole module on a batch to find out what its blocks do. That takes longer than training its own
    stage, and is alike on all of them.
    """

    def __init__(self, path: str, memory: Memory) -> None:
        self.path, self.memory = path, memory

    def make_plans(self, *args: Any) -> Plans:
        with open(self.path, "r+b") as file:  # closed, and so unlocked, at the end
            fcntl.flock(file, fcntl.LOCK_EX)
            decided = file.read()
            if not decided:
                plans, taken = self._decide(*args)
                file.write(_pickled((plans, taken)))
                return plans
        plans, taken = pickle.loads(decided)
        self.memory.peak = max(self.memory.peak, self.memory.live + taken)  # it takes that memory on every real rank
        return plans

    def _decide(self, *args: Any) -> tuple[Plans, int]:
        """The plans, and the memory that it takes to find them."""
        before, live = self.memory.restart(), self.memory.live
        plans = make_plans(*args)
        peak = self.memory.peak
        self.memory.peak = max(before, peak)
        return plans, peak - live


def plan_on_numbers(*args: Any, **kwargs: Any) -> Any:
    """The plan for tensor ranks, on real numbers: the proof makes its own."""
    with _disable_current_modes():
        return plan_tensor(*args, **kwargs)


def _pickled(value: Any) -> bytes:
    """Nothing where a batch has parts that cannot be sent to another process: then every rank plans for itself."""
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, TypeError, AttributeError):
        return b""
