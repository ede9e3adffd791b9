"""A pool of worker processes that is started once and reused by every multi-process test.

`run(function, *args, world=2)` runs a module-level function on `world` ranks and returns what each returned. The
environment of a rank is that of a torchrun job, so a `Trainer` inside finds it; a bare process group is started with
`group=True`. Each job begins with the seed 0, one thread, no warnings, and the constants of the package. A job that does
not end in time is killed, and the error shows where each rank stood.
"""

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from lightning_3d.zero import shard_units

PRELOAD = [
    "torch",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "lightning.pytorch",
    "lightning_3d.strategy.strategy",
]
GRACE = 20.0
"""Seconds that the other ranks get once one has failed."""
MANY_THREADS = 60
"""A worker with more is replaced. Each of gloo's process groups has a thread that wakes up a hundred times a second, and
lives as long as anything knows the group, such as DTensor's caches: after some hundred tests they take half the machine."""
TOGETHER_BYTES = shard_units.TOGETHER_BYTES
"""The limit that users have. Here there is none: modules of tests are small, and are to be sharded block by block."""
shard_units.TOGETHER_BYTES = 0
IMPORTED = 20
"""Modules that a job imported, from which on they are frozen too."""


class WorkerError(AssertionError):
    """A rank raised; the message is its traceback."""


class WorkerHang(AssertionError):
    """A rank did not end in time; the message shows where each one stood."""


class Pool:
    def __init__(self) -> None:
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOAD)
        self.workers: list[tuple[Any, Connection, Path]] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        """Removed at the end of the process. A worker, which imports this module too, makes none."""

    def grow(self, world: int) -> None:
        self.folder = self.folder or tempfile.TemporaryDirectory(prefix="workers_")
        while len(self.workers) < world:
            ours, theirs = self.context.Pipe()
            stack = Path(self.folder.name) / f"stack{len(self.workers)}_{time.monotonic_ns()}"
            process = self.context.Process(target=_serve, args=(theirs, str(stack), sys.path), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours, stack))

    def kill(self) -> None:
        for process, pipe, _ in self.workers:
            if process.is_alive():
                process.kill()
            process.join()
            pipe.close()
        self.workers = []

    def run(
        self, function: Callable[..., Any], args: tuple[Any, ...], world: int, timeout: float, group: bool
    ) -> list[Any]:
        if any(len([*Path(f"/proc/{one.pid}/task").glob("*")]) > MANY_THREADS for one, _, _ in self.workers):
            self.kill()
        self.grow(world)
        # One store for the job, as torchrun's agent has: a second process group of a job needs a prefix of its own.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        job = (function.__module__, function.__qualname__, pickle.dumps(args), store.port, group, timeout)
        for rank in range(world):
            self.workers[rank][1].send((*job, rank, world))
        results: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout
        while len(results) < world:
            pending = {self.workers[rank][1]: rank for rank in range(world) if rank not in results}
            for pipe in wait(list(pending), timeout=max(0.0, deadline - time.monotonic())):
                rank = pending[pipe]  # type: ignore[index]
                try:
                    results[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    self.workers[rank][0].join(5)  # its pipe closes before its exit code is known
                    code = self.workers[rank][0].exitcode
                    results[rank] = ("died", f"rank {rank} died with exit code {code}\n{self._read(rank)}")
                if results[rank][0] != "ok":
                    deadline = min(deadline, time.monotonic() + GRACE)
            if time.monotonic() >= deadline:
                break
        failed = {rank: text for rank, (kind, text) in results.items() if kind != "ok"}
        stuck = [rank for rank in range(world) if rank not in results]
        if stuck:
            stacks = "\n".join(f"--- rank {rank} stands at\n{self._stack(rank)}" for rank in stuck)
            self.kill()
            failures = "\n".join(f"--- rank {rank}\n{text}" for rank, text in failed.items())
            raise (WorkerError if failed else WorkerHang)(
                f"{function.__qualname__}: {failures}\nnot ended: {stuck}\n{stacks}"
            )
        if failed:
            if any(kind == "died" for kind, _ in results.values()):
                self.kill()
            raise WorkerError("\n".join(f"--- rank {rank}\n{text}" for rank, text in sorted(failed.items())))
        return [results[rank][1] for rank in range(world)]

    def _stack(self, rank: int) -> str:
        process, _, stack = self.workers[rank]
        if not process.is_alive():
            return "(dead)"
        os.kill(process.pid, signal.SIGUSR1)
        for _ in range(30):  # a busy machine takes a while
            time.sleep(0.1)
            if stack.exists() and stack.stat().st_size:
                time.sleep(0.1)
                break
        return self._read(rank)

    def _read(self, rank: int) -> str:
        """The stack that a rank wrote last. Its main thread comes last, the innermost call first."""
        stack = self.workers[rank][2]
        text = stack.read_text() if stack.exists() else "(no stack)"
        return text[max(0, text.rfind("hread 0x") - 10) :][:3000]


def _serve(pipe: Connection, stack: str, path: list[str]) -> None:
    sys.path[:] = path
    file = open(stack, "w")  # noqa: SIM115 (open for the life of the process: the signal handler writes to it)
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
    faulthandler.enable(file=file)  # of a crash too
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    import torch
    from lightning.fabric.utilities import registry

    torch.set_num_threads(1)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] (may have dataloader workers)
    gc.freeze()  # the imported modules, which would take most of the time of each collection below
    gc.get_freeze_count = lambda: 1  # it counts a million objects, in each fit: 0.05 s
    registry.entry_points = functools.cache(registry.entry_points)  # each Trainer reads the metadata of all packages
    frozen = len(sys.modules)
    while True:
        try:
            module, name, args, port, group, timeout, rank, world = pipe.recv()
        except (EOFError, OSError):
            return
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world), GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="tests",
            TORCHELASTIC_USE_AGENT_STORE="True",
        )  # fmt: skip
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # nobody reads what a worker prints: tests catch what they look for
                result = _call(module, name, args, group, timeout, rank, world)
                # as plain bytes: a tensor that is sent as such keeps a file open at the other end
                pipe.send_bytes(pickle.dumps(("ok", result)))
        except BaseException:
            pipe.send_bytes(pickle.dumps(("raised", traceback.format_exc())))
        # A Trainer is a heap of cycles, and as long as it is not collected its process groups live (see MANY_THREADS).
        gc.collect()
        if len(sys.modules) > frozen + IMPORTED:
            gc.freeze()
            frozen = len(sys.modules)


@contextlib.contextmanager
def _constants_kept() -> Iterator[None]:
    """Give the package's constants back what they were: the next job may run on some of these ranks and on others."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] == "lightning_3d"]
    before = [(module, name, value) for module in modules for name, value in vars(module).items() if name.isupper()]
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _call(module: str, name: str, args: bytes, group: bool, timeout: float, rank: int, world: int) -> Any:
    import random
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    random.seed(0)
    torch.manual_seed(0)
    try:
        if group:
            dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=timeout))
            dist.barrier()  # a rank that has nothing to send would leave before the others have connected to it
        with _constants_kept():
            return function(*pickle.loads(args))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


_pool = Pool()
atexit.register(_pool.kill)


def run(
    function: Callable[..., Any],
    *args: Any,
    world: int,
    timeout: float = 180.0,
    group: bool = False,
    fresh: bool = False,
) -> list[Any]:
    """What `function(*args)` returned on each of `world` ranks.

    Workers import `function` by name. After `timeout` seconds the job is killed, and the test fails with the place of
    each rank. `group` starts a gloo process group first (a `Trainer` starts its own). `fresh` takes new processes.
    """
    if fresh:
        _pool.kill()
    return _pool.run(function, args, world, timeout, group)
