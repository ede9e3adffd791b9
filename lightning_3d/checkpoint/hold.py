"""Locks on files that are in use. The system takes them back when a process ends, however it ends.

A file system without locks has nothing in use: what another process writes there may be taken for a leftover.
"""

import fcntl
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO


def hold(file: BinaryIO) -> BinaryIO:
    """`file`, locked for this process until `release`."""
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return file


class Reading:
    """A file that stays locked against removal until this is gone."""

    def __init__(self, file: Any) -> None:
        self.file, self.process = file, os.getpid()

    def __del__(self) -> None:
        if self.file is not None:
            if self.process != os.getpid():  # forked: the lock is that of the other process
                self.file.close()
            else:
                release(self.file)

    def __reduce__(self) -> Any:
        return Reading, (None,)  # a copy, or another process, has no lock of its own


def share(file: IO[bytes]) -> bool:
    """Lock `file` against removal, as others may too; False where someone removes or writes it just now."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here
        return True
    return True


def release(file: IO[bytes]) -> None:
    """Undo `hold` and close; closing alone would leave the lock with processes that were forked meanwhile."""
    if not file.closed:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)
        file.close()


def is_held(path: Path) -> bool:
    """Whether anyone writes `path` or reads it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def beside(path: Path) -> Path:
    """A name in the folder of `path` that nobody can foresee."""
    return path.with_name(f"{path.name}.{os.urandom(8).hex()}.part")


def put_away(path: Path) -> None:
    """Take `path` away in one step; the next `sweep_beside` removes it."""
    os.rename(path, beside(path))


def sweep_beside(path: Path) -> bool:
    """Remove what was put away, and what killed saves to `path` left. True where another job saves to it now."""
    found = [file for file in path.parent.iterdir() if _is_beside(file.name, path.name)]
    held = [file for file in found if is_held(file)]
    for file in found:
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file, ignore_errors=True)  # another rank or job may do so too
        elif file not in held:
            file.unlink(missing_ok=True)
    return bool(held)


def _is_beside(name: str, of: str) -> bool:
    return name.startswith(of) and re.fullmatch(r"\.[0-9a-f]{16}\.part", name[len(of) :]) is not None


def shared(path: object) -> str:
    """The warning to a job that is not alone."""
    return (
        f"Another job saves to {path} too. What is there is of the one that saved last, so that a restart may go on"
        " from the other's. Give each job a directory of its own: ModelCheckpoint(dirpath=...)."
    )
