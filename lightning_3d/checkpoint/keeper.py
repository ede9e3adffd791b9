"""`Keeper`: saves, loads and removes checkpoints for a strategy, in either format."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Literal

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_3d.checkpoint.collect import Collected, Collector
from lightning_3d.checkpoint.full_files import with_configs
from lightning_3d.checkpoint.locks import shared
from lightning_3d.checkpoint.manifest import NAME, is_sharded, remove_directory, without_manifest
from lightning_3d.checkpoint.placement import Splits
from lightning_3d.checkpoint.remote_path import Place, RemotePath, located, of_other_format
from lightning_3d.checkpoint.save import (
    CopyBuffer,
    SaveFailed,
    carry_out,
    on_every_rank,
    on_first_rank,
    prepare,
    snapshot,
)
from lightning_3d.checkpoint.single_file import copied, load_file, save_file
from lightning_3d.checkpoint.stored import HYPER, Opened
from lightning_3d.errors import CheckpointError, RunError
from lightning_3d.ranks import agreement, talk
from lightning_3d.tensor.geometry import TensorSplit

CheckpointFormat = Literal["auto", "sharded", "full"]
SHARDED_FROM_BYTES = 2**30
"""With "auto", states larger than this are saved sharded."""
PATIENCE = 10.0
"""Seconds that a rank waits for another's file where there is no process group, and so no barrier."""


class Keeper:
    """Saves, loads and removes checkpoints. `Strategy3D` explains the arguments."""

    def __init__(
        self, format: CheckpointFormat = "auto", asynchronous: bool = False, timeout: timedelta = timedelta(minutes=30)
    ) -> None:
        self.format, self.asynchronous, self.timeout = format, asynchronous, timeout
        self._background = Background()
        self._copy_buffer = CopyBuffer()
        self._failed = False
        """True if the last save that ended has failed."""
        self._old: dict[str, CheckpointIO] = {}
        """Checkpoints to remove once a save has succeeded."""
        self._saved: dict[Place, object] = {}
        """Identities of the saved files, to recognise those that another job writes to the same names."""
        self._refused: set[str] = set()
        """Names that the user has been warned of."""
        self.instead: list[str] = []
        """Checkpoints to load if the last one is damaged, the newest first."""

    def prefer(self, newest_first: list[str]) -> None:
        """Load the first of these that is not damaged, in the place of one that is."""
        self.instead = newest_first

    def is_sharded(self, module: nn.Module, io: CheckpointIO) -> bool:
        """Return True if the format is sharded. Equal on every rank, before anything is gathered."""
        if self.format == "auto":
            return type(io) is TorchCheckpointIO and state_bytes(module) > SHARDED_FROM_BYTES
        return self.format == "sharded"

    def save(
        self,
        checkpoint: dict[str, Any],
        path: Any,
        *,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        splits: Splits,
        own: Mapping[str, Any],
        copies: Mapping[int, TensorSplit | None],
    ) -> None:
        """Save sharded. `checkpoint` has this rank's shards, `copies` splits of copies of parameters. Collective."""
        talk.meet("save_checkpoint")
        collector = Collector(module, splits, copies, talk.place()[0])
        collect = partial(collector.collect, with_configs(checkpoint, module), optimizers, own)
        found = on_every_rank(collect, path)
        self._begin(path)
        target = located(path)
        self._warn_of_other_jobs(target)
        self._warn_of_pickled(target, [name for name in found.objects if HYPER not in name])
        self._do(lambda: self._save(found, target))

    def _save(self, found: Collected, target: Place) -> None:
        job = prepare(found, target, talk.place()[0])

        def work(group: dist.ProcessGroup | None = None) -> None:
            carry_out(still, group)
            self._saved[target] = _identity(target)

        if self.asynchronous:
            still = on_every_rank(lambda: snapshot(job, self._copy_buffer), target)
            self._background.start(work, self.timeout)
        else:
            still = job
            work()

    def save_file(self, checkpoint: dict[str, Any], path: Any, io: CheckpointIO, storage_options: Any) -> None:
        """Save a single file. `checkpoint` counts on rank 0. Collective."""
        self._begin(path)
        target = located(path)
        if type(io) is not TorchCheckpointIO or isinstance(target, RemotePath) or storage_options is not None:
            save = partial(_save_by, io, checkpoint, path, storage_options)
            agreement.together(save if _writer() == 0 else lambda: None, local=True)
            return
        self._warn_of_other_jobs(target)
        still = checkpoint
        if self.asynchronous:
            still = on_every_rank(lambda: copied(checkpoint) if _writer() == 0 else {}, path)

        def write() -> None:
            refused = save_file(still, target)
            self._saved[target] = _identity(target)
            self._warn_of_pickled(target, refused)

        work = partial(on_first_rank, write, path, _writer())
        if self.asynchronous:
            self._background.start(work, self.timeout)
        else:
            self._do(work)
        if _writer() and not dist.is_initialized():
            _await(target)

    def _warn_of_pickled(self, target: Place, names: Sequence[str]) -> None:
        """Warn, once, of what a start that loads `target` will refuse to unpickle."""
        new = [name for name in names if name not in self._refused]
        self._refused.update(new)
        if new:
            rank_zero_warn(
                f"{target} contains {', '.join(new)[:300]}, which only pickle can store. Loading it may run any code,"
                ' so a restart, with resume="auto" too, refuses it. Save plain values and tensors, omit'
                " hyperparameters with save_hyperparameters(ignore=[...]), allow classes with"
                " torch.serialization.add_safe_globals, or pass ckpt_path= and weights_only=False to fit."
            )

    def _warn_of_other_jobs(self, target: Place) -> None:
        if self._is_foreign(target):
            rank_zero_warn(shared(target))

    def _is_foreign(self, target: Place) -> bool:
        """Return True if another job has saved to `target` since this one did."""
        mine = self._saved.get(target)
        return mine is not None and _identity(target) not in (None, mine)

    def _begin(self, path: Any) -> None:
        self.wait()
        self._failed = False
        self._old.pop(os.fspath(path), None)

    def wait(self, patience: float | None = None) -> None:
        """Return once no save is under way. A failed disk becomes a warning; all other problems raise."""
        self._do(lambda: self._background.wait(patience))

    def close(self) -> None:
        """Await the last save; the process group may end then."""
        try:
            self.wait()
        finally:
            self._background.close()
            self.forget()

    def forget(self) -> None:
        """The process group is gone."""
        self._background, self._copy_buffer = Background(), CopyBuffer()

    def _do(self, save: Callable[[], None]) -> None:
        try:
            save()
        except SaveFailed as error:
            self._failed = True
            rank_zero_warn(f"{error} Training continues.")

    def load(self, path: Any, weights_only: bool | None, io: CheckpointIO) -> dict[str, Any]:
        """Open a checkpoint of either format. Raises on every rank if any finds it damaged. Collective.

        With `ckpt_path="last"`, skip damaged ones, with a warning for each.
        """
        self.wait()
        path, instead = talk.gather((path, self.instead))[0]
        older = instead[instead.index(str(path)) + 1 :] if str(path) in instead else []
        self.instead = []

        def load() -> dict[str, Any]:
            return agreement.together(lambda: self._load(path, weights_only, io), local=True)

        for candidate in older:
            try:
                return load()
            except (RunError, OSError) as error:
                rank_zero_warn(f"Skipping the checkpoint {path}: {error} Trying {candidate}.")
                path = candidate
        return load()

    def _load(self, path: Any, weights_only: bool | None, io: CheckpointIO) -> dict[str, Any]:
        place = located(path)
        if is_sharded(place):
            opened = Opened.open(place)
            opened.verify(*talk.place())
            return opened.state(weights_only)
        if place.is_dir() and type(io) is TorchCheckpointIO:
            raise CheckpointError(without_manifest(place))
        local = isinstance(place, Path)
        return load_file(io, os.fspath(path).removeprefix("file://") if local else path, weights_only, local=local)

    def remove(self, path: Any, io: CheckpointIO) -> None:
        """Remove a checkpoint, on rank 0, once the one that takes its place is there."""
        self._old[os.fspath(path)] = io
        if not self._failed:
            self._background.afterwards(self._remove_old)
        elif located(path).exists():
            rank_zero_warn(f"{path} is kept until a save succeeds: the one after it could not be written.")

    def _remove_old(self) -> None:
        for path in list(self._old):
            target = located(path)
            if self._is_foreign(target):
                rank_zero_warn(f"{path} is not removed. {shared(path)}")
            elif is_sharded(target):
                if not remove_directory(target):
                    continue  # someone reads it: it goes after a later save
            else:
                self._old[path].remove_checkpoint(path)
            self._old.pop(path)


def state_bytes(module: nn.Module) -> int:
    """Of the weights, and of two states for each that is trained."""
    return sum(p.numel() * p.element_size() * (3 if p.requires_grad else 1) for p in module.parameters())


def _save_by(io: CheckpointIO, checkpoint: dict[str, Any], path: Any, storage_options: Any) -> None:
    target = located(path)
    if isinstance(target, RemotePath) and is_sharded(target):
        raise CheckpointError(of_other_format(path, "a sharded checkpoint"))
    io.save_checkpoint(checkpoint, path, storage_options=storage_options)


def _identity(path: Place) -> object:
    """Changes with each save to `path`; None while nothing is there."""
    try:
        file = path / NAME if path.is_dir() else path
        if isinstance(file, RemotePath):
            return file.version()
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _writer() -> int:
    """The rank as far as writing one file goes: before there is a process group its launcher knows it already."""
    return dist.get_rank() if dist.is_initialized() else int(rank_zero_only.rank)  # type: ignore[attr-defined]


def _await(file: Path) -> None:
    """A script may list or load what it has just saved, on every rank. On a disk of its own a rank gives up."""
    end = time.monotonic() + PATIENCE
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.01)


class Background:
    """Runs a save in a thread, over a process group of its own: the main thread uses the others."""

    def __init__(self) -> None:
        self._group: dist.ProcessGroup | None = None
        self._thread: Thread | None = None
        self._error: Exception | None = None
        self._after: list[Callable[[], None]] = []
        self._over = True
        self._lock = Lock()

    def __reduce__(self) -> Any:
        return Background, ()  # a strategy that is copied or sent to another process saves nothing yet

    def start(self, work: Callable[[dist.ProcessGroup | None], None], timeout: timedelta) -> None:
        """Run `work` with a group of all ranks, of which each message ends within `timeout`. Collective."""
        assert self._thread is None, "await the save before"
        if dist.is_initialized() and self._group is None:
            self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._over = False
        self._thread = Thread(target=self._run, args=(work,), name="lightning_3d save", daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[dist.ProcessGroup | None], None]) -> None:
        try:
            work(self._group)
        except Exception as error:  # raised by `wait`, in the thread that trains
            self._error = error
        with self._lock:
            self._over = True
            if self._error is None:
                self._error = _first_error(self._after)
            self._after = []

    def afterwards(self, do: Callable[[], None]) -> None:
        """Call `do` once nothing is under way, unless what was has failed."""
        with self._lock:
            if not self._over:
                self._after.append(do)
                return
            failed = self._error is not None
        if not failed:
            do()

    def wait(self, patience: float | None = None) -> None:
        """Return once nothing is under way; raise what went wrong since the last time, or after `patience` seconds."""
        if self._thread is None:
            return
        self._thread.join(patience)
        if self._thread.is_alive():
            return
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Give the group back, whose threads and sockets would add up over the runs of a process."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def _first_error(calls: list[Callable[[], None]]) -> Exception | None:
    for call in calls:
        try:
            call()
        except Exception as error:
            return error
    return None
