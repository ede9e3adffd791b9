"""A file without a name on a disk, for tensors: read and written past the page cache, by threads.

Nothing is left behind, also after a kill: the system frees a file without a name when the process ends. The file is
mapped too. A tensor whose memory is the mapping can be read and written by any code at any time, page by page, which
is slow. `read` and `write` move regions at the speed of the disk.
"""

import errno
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_3d.errors import ConfigurationError, RunError
from lightning_3d.module.amounts import show_bytes

PAGE = 4096
"""Alignment that a direct read or write needs, of the memory and of the place in the file."""
CHUNK = 8 * 2**20
"""Bytes of one read or write."""
THREADS = 4
"""A disk is fast only with several reads or writes at once. Threads that wait for one need no core."""
_EXTENT = 64 * 2**20
"""The least bytes by which a file grows."""
_MEMORY = ("tmpfs", "ramfs", "devtmpfs")


class Buffer:
    """Memory at the start of a page."""

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, paged(nbytes))
        self.bytes: Tensor = torch.frombuffer(self.memory, dtype=torch.uint8)


class Transfer:
    """Reads or writes under way."""

    def __init__(self, parts: Sequence[Future[None]] = ()) -> None:
        self.parts = parts

    @property
    def done(self) -> bool:
        return all(part.done() for part in self.parts)

    def wait(self) -> None:
        for part in self.parts:
            part.result()


@dataclass(frozen=True, eq=False)
class DiskRegion:
    """Bytes of a file, reserved for one tensor."""

    file: "DiskFile"
    start: int
    """Offset of the first byte in the file."""
    nbytes: int
    extent: mmap.mmap
    at: int
    """Offset of the first byte in `extent`."""
    mapped: Tensor

    def read(self, buffer: Buffer, at: int) -> Transfer:
        """Start to fill `buffer` from byte `at` on."""
        return self.file.move(os.preadv, buffer, at, self)

    def write(self, buffer: Buffer, at: int) -> Transfer:
        """Start to write what is in `buffer` from byte `at` on."""
        return self.file.move(os.pwritev, buffer, at, self)

    def forget_pages(self) -> None:
        """Give back the memory of pages that somebody has read or written by the mapping; the file has them."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.extent.madvise(mmap.MADV_DONTNEED, self.at, paged(self.nbytes))


class DiskFile:
    """A file without a name in `folder`. Raises `ConfigurationError` where there can be none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.descriptor = _opened(folder)
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="lightning_3d_disk")
        weakref.finalize(self, _close, self.descriptor, self.threads)
        self.size = 0
        self._extent: mmap.mmap | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self.mapped: list[tuple[int, int]] = []
        """First and last address of each mapping."""

    def reserve(self, nbytes: int, what: str) -> None:
        """Have room for `nbytes` in all, of `what`. The disk is asked for it now, not in a step."""
        if nbytes <= 0:
            return
        nbytes = paged(nbytes)
        disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize
        try:
            if nbytes > free:  # asked first: the system would fill the disk before it refuses
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.posix_fallocate(self.descriptor, self.size, nbytes)
            self._extent = mmap.mmap(self.descriptor, nbytes, offset=self.size)
        except OSError as error:
            raise ConfigurationError(
                f"The disk of {self.folder} has no room for {what}: this rank needs {show_bytes(nbytes)}"
                f" ({error.strerror}; {show_bytes(free)} are free). Free some, choose another disk, or offload to"
                ' "cpu".'
            ) from error
        self._bytes = torch.frombuffer(self._extent, dtype=torch.uint8)
        self._used, self.size = 0, self.size + nbytes
        self.mapped.append((self._bytes.data_ptr(), self._bytes.data_ptr() + nbytes))

    def region(self, nbytes: int) -> DiskRegion:
        room = paged(nbytes)
        if self._used + room > len(self._bytes):
            self.reserve(max(room, _EXTENT), "more tensors")
        assert self._extent is not None
        at, self._used = self._used, self._used + room
        start = self.size - len(self._bytes) + at
        return DiskRegion(self, start, nbytes, self._extent, at, self._bytes[at : at + nbytes])

    def move(self, how: object, buffer: Buffer, at: int, region: DiskRegion) -> Transfer:
        """Start to read or write a region, in parts at once."""
        size = paged(region.nbytes)
        whole = memoryview(buffer.memory)
        return Transfer(
            [
                self.threads.submit(
                    _move, how, self.descriptor, whole[at + low : at + min(size, low + CHUNK)], region.start + low,
                    self.folder,
                )
                for low in range(0, size, CHUNK)
            ]
        )  # fmt: skip


def paged(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _move(how: object, descriptor: int, memory: memoryview, start: int, folder: Path) -> None:
    """Read or write all of `memory`: a call may do less than it was asked for."""
    done = 0
    while done < len(memory):
        try:
            count = how(descriptor, [memory[done:]], start + done)  # type: ignore[operator]
        except OSError as error:
            raise RunError(f"The disk of {folder} failed while training: {error.strerror}.") from error
        if not count:
            raise RunError(f"The file of offloaded tensors in {folder} ends early: another process has cut it short.")
        done += count


def _opened(folder: Path) -> int:
    """A descriptor of a new file without a name, past the page cache where the file system can do that."""
    if not folder.is_dir():
        raise ConfigurationError(
            f'offload has "nvme:{folder}", and there is no such folder on this machine. Make it on each machine of the'
            " job, on a local disk."
        )
    kind = _file_system(folder)
    if kind in _MEMORY:
        rank_zero_warn(
            f'offload has "nvme:{folder}", which is a {kind}: that is memory, so nothing is saved. Choose a folder on a'
            " disk."
        )
    direct = getattr(os, "O_DIRECT", 0)
    for flags in (direct, 0):
        try:
            return os.open(folder, getattr(os, "O_TMPFILE") | os.O_RDWR | flags, 0o600)  # noqa: B009
        except (OSError, AttributeError):
            continue  # tmpfs has no direct files, some network file systems none without a name
    try:
        descriptor, name = tempfile.mkstemp(dir=folder)
        os.unlink(name)
    except OSError as error:
        raise ConfigurationError(
            f'offload has "nvme:{folder}", in which this process may not make a file ({error.strerror}). Choose a'
            " folder that it may write to."
        ) from error
    return descriptor


def _file_system(folder: Path) -> str:
    """The kind of file system that `folder` is on, "" where the system does not say."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    table = Path("/proc/self/mountinfo")
    lines = table.read_text().splitlines() if table.exists() else []
    kinds = [line.partition(" - ")[2].split()[0] for line in lines if line.split()[2] == number]
    return kinds[0] if kinds else ""


def _close(descriptor: int, threads: ThreadPoolExecutor) -> None:
    threads.shutdown(wait=True)
    os.close(descriptor)
