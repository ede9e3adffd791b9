"""What is decided on the whole module before it is placed: found out by one simulated rank, for all."""

import fcntl
import pickle
from collections.abc import Callable
from typing import Any

# private to torch, read in 2.13
from torch.utils._python_dispatch import _disable_current_modes

from lightning_3d.auto import Decided, Situation, decide
from lightning_3d.compose import Plans
from lightning_3d.dryrun.pretend import Memory
from lightning_3d.place import make_plans
from lightning_3d.tensor.infer import plan_tensor


class Decision:
    """What the first simulated rank that comes decides. The others wait for it, as real ranks do for rank 0.

    Every rank runs the whole module on a batch to find out what its blocks do. That takes longer than training its own
    stage, and is alike on all of them.
    """

    def __init__(self, path: str, memory: Memory) -> None:
        self.path, self.memory = path, memory

    def make_plans(self, *args: Any) -> Plans:
        return self._once("plans", lambda: make_plans(*args))

    def decide(self, situation: Situation) -> Decided:
        """Under `layout="auto"`."""
        return self._once("layout", lambda: decide(situation))

    def _once(self, what: str, find: Callable[[], Any]) -> Any:
        with open(self.path, "r+b") as file:  # closed, and so unlocked, at the end
            fcntl.flock(file, fcntl.LOCK_EX)
            decided = _decisions(file.read())
            if what not in decided:
                found, taken = self._measured(find)
                file.seek(0)
                file.write(_pickled({**decided, what: (found, taken)}))
                return found
        found, taken = decided[what]
        self.memory.peak = max(self.memory.peak, self.memory.live + taken)  # it takes that memory on every real rank
        return found

    def _measured(self, find: Callable[[], Any]) -> tuple[Any, int]:
        """What is found, and the memory that it takes to find it."""
        before, live = self.memory.restart(), self.memory.live
        found = find()
        peak = self.memory.peak
        self.memory.peak = max(before, peak)
        return found, peak - live


def chosen_layout(path: str) -> Decided | None:
    """What the ranks that were simulated have chosen, if they came so far."""
    with open(path, "rb") as file:
        found: tuple[Decided, int] | None = _decisions(file.read()).get("layout")
    return None if found is None else found[0]


def plan_on_numbers(*args: Any, **kwargs: Any) -> Any:
    """The plan for tensor ranks, on real numbers: the proof makes its own."""
    with _disable_current_modes():
        return plan_tensor(*args, **kwargs)


def _decisions(raw: bytes) -> dict[str, Any]:
    return pickle.loads(raw) if raw else {}


def _pickled(decisions: dict[str, Any]) -> bytes:
    """Without what cannot be sent to another process, such as parts of a batch: every rank decides that for itself."""
    while decisions:
        try:
            return pickle.dumps(decisions)
        except (pickle.PicklingError, TypeError, AttributeError):
            decisions = dict(list(decisions.items())[:-1])
    return b""
