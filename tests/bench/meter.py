"""The meter of one rank: it waits for its turn, and measures time, memory and traffic.

A training loop calls `begin` before the first line of set-up, and `step_begins` and `step_ends` around each step.
"""

import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WARM = 3
"""First steps, in no turn. Traffic is counted in the last of them."""


class Traffic(TorchDispatchMode):
    """Bytes that this rank gives to `torch.distributed`; for collectives those that a ring would send."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self.bytes += sent(func, args)
        return func(*args, **(kwargs or {}))


def sent(func: Any, args: Any) -> float:
    """Return the bytes of one call of a collective, by the largest of its tensors."""
    name = func._schema.name.split("::")[1]
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    if not tensors or "wait" in name or "barrier" in name or name.startswith("recv"):
        return 0.0
    full = float(max(tensor.nbytes for tensor in tensors))
    if name == "send":
        return full
    size = _size(args)
    if "gather" in name and func.namespace == "_c10d_functional":
        full *= size  # its only tensor is the shard
    share = (size - 1) / size
    return full * share * (2 if "reduce" in name and "scatter" not in name else 1)


def _size(args: Any) -> int:
    for leaf in torch.utils._pytree.tree_leaves(args):
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            return torch.distributed.ProcessGroup.unbox(leaf).size()
    return torch.distributed.get_world_size()


class Meter:
    def __init__(self, pipe: Connection, steps: int, rounds: int, rank: int, world: int) -> None:
        self.rank, self.world, self.total = rank, world, WARM + steps * rounds
        self._pipe, self._steps, self._count = pipe, steps, 0
        self._traffic = Traffic()
        self.ledger: Any = None
        """Where the traffic is counted that does not pass through `torch.distributed`."""
        self.losses: list[float] = []

    def begin(self) -> None:
        """Call it before the module is built. The clock starts once all ranks have imported what they need."""
        self._send(imported=True)
        self._pipe.recv()
        self._resident = _status("VmRSS")
        _reset_peak()
        self._began, self._cpu = time.monotonic(), time.process_time()

    def step_begins(self) -> None:
        if self._count == WARM - 1:
            self._before = self.ledger.bytes() if self.ledger else 0
            self._traffic.__enter__()

    def step_ends(self, loss: float) -> None:
        """Send the numbers of a turn at its end, and wait for the next one."""
        self._count += 1
        self.losses.append(loss)
        if self._count == 1:
            wait()
            self._send(started=time.monotonic() - self._began, started_cpu=time.process_time() - self._cpu)
            self._send(start_peak=self._peak())
        if self._count == WARM:
            self._traffic.__exit__(None, None, None)
            ledger = self.ledger.bytes() - self._before if self.ledger else 0
            self._send(sent=max(ledger, self._traffic.bytes))
            _reset_peak()
            self._turn()
        elif self._count > WARM and (self._count - WARM) % self._steps == 0:
            wait()
            host, cpu = time.thread_time() - self._host, time.process_time() - self._cpu
            self._send(end=time.monotonic(), host=host / self._steps, cpu=cpu / self._steps, peak=self._peak())
            self._send(loss=sum(self.losses[-self._steps :]) / self._steps)
            if self._count == self.total:
                self._send(over=True)
            else:
                self._turn()

    def _turn(self) -> None:
        self._send(waits=True)
        self._pipe.recv()
        self._send(begin=time.monotonic())
        self._host, self._cpu = time.thread_time(), time.process_time()

    def _send(self, **found: Any) -> None:
        self._pipe.send(found)

    def _peak(self) -> float:
        if torch.cuda.is_available():
            return float(torch.cuda.max_memory_allocated())
        return _status("VmHWM") - self._resident


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _status(key: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024.0 * int(next(line for line in lines if line.startswith(key)).split()[1])


def _reset_peak() -> None:
    """Let the peak of memory be counted from here."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")
