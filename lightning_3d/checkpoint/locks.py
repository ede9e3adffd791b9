"""Locks on files that are in use. The system takes them back when a process ends, however it ends.

A file system without locks, or a remote store, has nothing in use: what another process writes there may be taken for
a leftover.
"""

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from lightning_3d.checkpoint.remote_path import Place, RemotePath

ATTEMPTS = 100
"""To lock what others lock for a moment."""
PATIENCE = 60.0
"""Seconds that one job waits for another to remove old files."""


def create(path: Path) -> BinaryIO:
    """A new file, locked for this process until `release`."""
    for _ in range(ATTEMPTS):
        file = open(path, "x+b")  # noqa: SIM115 (for as long as it is locked)
        if lock(file.fileno(), path, fcntl.LOCK_EX):
            return file
        file.close()  # a sweep has found it before it was locked
        path.unlink(missing_ok=True)
    raise FileNotFoundError(f"{path} is removed as often as it is made")


class Reading:
    """A file that stays locked against removal until this is gone; None where there is no lock."""

    def __init__(self, descriptor: int | None) -> None:
        self.descriptor, self.process = descriptor, os.getpid()

    def __del__(self) -> None:
        if self.descriptor is not None:
            if self.process == os.getpid():  # else forked: the lock is that of the other process
                with suppress(OSError):
                    fcntl.flock(self.descriptor, fcntl.LOCK_UN)
            os.close(self.descriptor)

    def __reduce__(self) -> Any:
        return Reading, (None,)  # a copy, or another process, has no lock of its own

    @classmethod
    def of(cls, path: Place) -> "Reading":
        """Lock `path` against removal, as others may too."""
        if isinstance(path, RemotePath):
            return cls(None)
        with suppress(OSError):  # who reads it says what is wrong
            for _ in range(ATTEMPTS if path.is_file() else 0):
                reading = cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                if lock(cast(int, reading.descriptor), path, fcntl.LOCK_SH):
                    return reading
                time.sleep(0.01)
        return cls(None)

    def read(self, path: Place) -> bytes:
        """The content of what is locked, which `path` may not be any more."""
        if self.descriptor is None:
            return path.read_bytes()
        with open(self.descriptor, "rb", closefd=False) as file:
            file.seek(0)
            return file.read()


def lock(descriptor: int, path: Path, kind: int) -> bool:
    """Lock what is open; False where someone has locked it otherwise, or `path` is another file by now."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here
        return True
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    return False


@contextmanager
def alone(directory: Place) -> Iterator[None]:
    """One process at a time is inside."""
    if isinstance(directory, RemotePath):
        yield
        return
    descriptor, end = os.open(directory, os.O_RDONLY | os.O_CLOEXEC), time.monotonic() + PATIENCE
    try:
        while not lock(descriptor, directory, fcntl.LOCK_EX):
            if time.monotonic() > end:
                raise TimeoutError(f"another process has kept {directory} locked for {PATIENCE:.0f} s")
            time.sleep(0.01)
        yield
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def release(file: BinaryIO) -> None:
    """Unlock and close; closing alone would leave the lock with processes that were forked meanwhile."""
    if not file.closed:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        file.close()


@contextmanager
def unused(path: Place) -> Iterator[bool]:
    """False where a process writes or reads `path`. Otherwise none begins to while inside."""
    if isinstance(path, RemotePath):
        yield True
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        yield True
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except BlockingIOError:
        free = False
    except OSError:
        free = True
    try:
        yield free
    finally:
        os.close(descriptor)


def is_in_use(path: Place) -> bool:
    with unused(path) as free:
        return not free


def unguessable_name(path: Path) -> Path:
    """A name in the folder of `path` that cannot be guessed."""
    return path.with_name(f"{path.name}.{os.urandom(8).hex()}.part")


def put_away(path: Path) -> None:
    """Take `path` away in one step; the next `remove_leftovers` removes it."""
    os.rename(path, unguessable_name(path))


def remove_leftovers(path: Path) -> bool:
    """Remove files put away, and those of killed saves to `path`. True where another job saves to it now."""
    held, leftover = False, re.compile(re.escape(path.name) + r"\.[0-9a-f]{16}\.part")
    for file in [file for file in path.parent.iterdir() if leftover.fullmatch(file.name)]:
        with unused(file) as free:
            held = held or not free
            if file.is_dir() and not file.is_symlink():
                shutil.rmtree(file, ignore_errors=True)  # another job may do so too
            elif free:
                file.unlink(missing_ok=True)
    return held


def shared(path: object) -> str:
    """The warning for two jobs that save to one name."""
    return (
        f"Another job saves to {path} too. The checkpoint there is of the job that saved last, so a restart may resume"
        " from the other job. Give each job a directory of its own: ModelCheckpoint(dirpath=...)."
    )
