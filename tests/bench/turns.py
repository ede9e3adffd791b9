"""Jobs of several processes that take turns: one runs a few steps while all others are stopped by a signal.

Whatever else the machine does hits all jobs alike, and a stopped job costs nothing but its memory.
"""

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from tests.bench.meter import Meter

Train = Callable[[Meter], None]
PRELOAD = ["torch", "lightning.pytorch", "lightning_3d"]
"""What a training script imports before `fit`; anything else counts as its start."""

PR_SET_PDEATHSIG = 1


@dataclass
class Job:
    """The processes of one contestant, and what they measured."""

    name: str
    train: Train
    world: int
    error: str = ""
    found: dict[str, Any] = field(default_factory=dict)
    turns: list[float] = field(default_factory=list)
    """Seconds of each turn, from the first rank's begin to the last rank's end."""
    hosts: list[float] = field(default_factory=list)
    """CPU seconds of a step in the main thread of a rank, which bound small modules on GPUs."""
    cpus: list[float] = field(default_factory=list)
    """CPU seconds of a step in all threads of all ranks: other work on the machine adds least to them."""
    loss: float = 0.0

    def start(self, steps: int, rounds: int, limit: float) -> None:
        """Start the processes and let them train until they wait for their first turn."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            given = (theirs, self.train, rank, self.world, port, steps, rounds)
            process = context.Process(target=_rank, args=given)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self._listen("imported", limit)
        self._go()
        ranks = self._listen("waits", limit)
        if not self.error:
            for key in ("started", "started_cpu", "start_peak", "sent"):
                self.found[key] = max(rank[key] for rank in ranks)
            self._signal(signal.SIGSTOP)

    def turn(self, limit: float, last: bool) -> None:
        self._signal(signal.SIGCONT)
        self._go()
        ranks = self._listen("over" if last else "waits", limit)
        if self.error:
            return
        self.turns.append(max(rank["end"] for rank in ranks) - min(rank["begin"] for rank in ranks))
        self.hosts.append(max(rank["host"] for rank in ranks))
        self.cpus.append(sum(rank["cpu"] for rank in ranks))
        self.loss = sum(rank["loss"] for rank in ranks) / self.world
        self.found["peak"] = max(rank["peak"] for rank in ranks)
        if last:
            self.end()
        else:
            self._signal(signal.SIGSTOP)

    def _go(self) -> None:
        if not self.error:
            for pipe in self.pipes:
                pipe.send("go")

    def end(self) -> None:
        for process in self.processes:
            process.join(10 if not self.error else 0)
            if process.is_alive():
                process.kill()
                process.join()

    def _signal(self, number: int) -> None:
        for process in self.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    def _listen(self, until: str, limit: float) -> list[dict[str, Any]]:
        """Return what each rank sent until `until`. After an error or `limit` seconds the job is over."""
        ranks: list[dict[str, Any]] = [{} for _ in self.pipes]
        deadline = time.monotonic() + limit
        while not self.error and any(until not in rank for rank in ranks):
            pending = [pipe for pipe, rank in zip(self.pipes, ranks, strict=True) if until not in rank]
            ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.error = f"no step in {limit:.0f} s"
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    ranks[rank] |= pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    self.processes[rank].join()
                    self.error = f"rank {rank} ended with exit code {self.processes[rank].exitcode}"
                self.error = self.error or ranks[rank].get("error", "")
        if self.error:
            self._signal(signal.SIGKILL)
            self.end()
        return ranks


def _rank(pipe: Connection, train: Train, rank: int, world: int, port: int, steps: int, rounds: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="bench", GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1", DS_BUILD_OPS="0", TOKENIZERS_PARALLELISM="false",
    )  # fmt: skip
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a stopped process would outlive a parent that is killed
    import torch

    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"
        torch.set_num_threads(1)
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (the table is printed by the parent)
    torch.manual_seed(0)
    try:
        train(Meter(pipe, steps, rounds, rank, world))
    except BaseException as error:
        pipe.send({"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"})
        traceback.print_exc()
        raise SystemExit(1) from None


def race(jobs: list[Job], steps: int, rounds: int, limit: float, say: Callable[[str], None]) -> None:
    """Start all jobs one after the other, and give each one turn in every round, in another order each time.

    An interrupt ends the race after the last full round.
    """
    for job in jobs:
        job.start(steps, rounds, limit)
        first = job.error or f"first step after {job.found['started']:.1f} s"
        say(f"{job.name}: {first}")
    try:
        for number in range(rounds):
            running = [job for job in jobs if not job.error]
            for job in running[number % max(1, len(running)) :] + running[: number % max(1, len(running))]:
                job.turn(limit, last=number == rounds - 1)
            say(f"round {number + 1} of {rounds}")
    except KeyboardInterrupt:
        say(f"interrupted in round {number + 1}")
        for job in jobs:
            del job.turns[number:], job.hosts[number:], job.cpus[number:]
    finally:
        for job in jobs:
            job._signal(signal.SIGKILL)
