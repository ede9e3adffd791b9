"""Ranks of a job as processes of their own, each of which a test may kill, stop or let fail."""

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import contextmanager
from pathlib import Path

from tests.workers import PRELOAD


class Squad:
    """`function(rank, *args)` on `world` new processes, with the environment that torchrun would give them.

    What a rank returned or raised is in `ended` once it has ended; a rank that was killed has nothing there.
    """

    def __init__(self, function, *args, world, folder, environment=None):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.world, self.folder = world, Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.processes = []
        for rank in range(world):
            self.file(rank).unlink(missing_ok=True)
            there = {**_environment(rank, world, port), **(environment or {})}
            job = (function, rank, args, there, sys.path, self.file(rank))
            self.processes.append(context.Process(target=_run, args=job, daemon=True))
            self.processes[-1].start()

    def file(self, rank):
        return self.folder / f"ended_{rank}.json"

    def send(self, rank, signum):
        if self.processes[rank].is_alive():
            os.kill(self.processes[rank].pid, signum)

    def wait(self, timeout, ranks=None):
        """Wait until `ranks` have ended; those that have not."""
        deadline = time.monotonic() + timeout
        ranks = range(self.world) if ranks is None else ranks
        for rank in ranks:
            self.processes[rank].join(max(0.0, deadline - time.monotonic()))
        return [rank for rank in ranks if self.processes[rank].is_alive()]

    @property
    def ended(self):
        files = {rank: self.file(rank) for rank in range(self.world)}
        return {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}

    def close(self):
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()


@contextmanager
def squad(function, *args, world, folder, environment=None):
    it = Squad(function, *args, world=world, folder=folder, environment=environment)
    try:
        yield it
    finally:
        it.close()


def _environment(rank, world, port):
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "tests",
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip


def _run(function, rank, args, environment, path, file):
    sys.path[:] = path
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    torch.set_num_threads(1)
    start = time.monotonic()
    try:
        result = {"returned": function(rank, *args)}
    except BaseException as error:
        traceback.print_exc()
        result = {"raised": type(error).__name__, "text": str(error)}
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps({**result, "seconds": time.monotonic() - start}))
    os.replace(beside, file)
    os._exit(0 if "returned" in result else 1)
