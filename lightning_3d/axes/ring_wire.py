"""Connections between neighbours of a ring: by the process group, or through shared memory on one machine (CPU).

Through a loopback socket every byte goes into the kernel and out again, on the cores that should compute. Here the
sender copies a segment into a slot and the receiver adds it from there. Two pipes carry eight bytes for each segment:
one announces the length of the next slot, the other returns free slots. A pipe is closed with the process at its
other end, so neighbours learn at once that one has ended.

Neither memory nor pipes have names: nothing stays behind, whatever way a process ends. The neighbour opens them through
the owner's entry in /proc, where the kernel lets only the same user in.
"""

import mmap
import os
import select
import struct
import sys
import time
import weakref
import zlib
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.errors import OTHER_BLOCKS, DivergenceError, PeerError
from lightning_3d.ranks.process_groups_private import timeout_of
from lightning_3d.ranks.talk import exchange

SLOTS = 4
"""Segments that can be under way to one neighbour."""
_WORD = struct.Struct("=iI")
"""The bytes of a segment, and a checksum of what its sender does."""


class SharedMemory:
    """The messages of one rank to the right neighbour and from the left one, all ranks being on one machine."""

    own_memory = True
    doing = ""
    """What this rank does now, in words. All ranks must do the same."""

    def __init__(self, outlet: "_Outlet", inlet: "_Inlet", timeout: float) -> None:
        self._outlet, self._inlet, self._timeout = outlet, inlet, timeout
        self._awaited: deque[Tensor] = deque()

    def post(self, receive: Tensor | None, send: Tensor | None) -> None:
        """Expect something like `receive`, and send another tensor, which must not change before `flush`.

        What `land` gave last is lost: its slot is free again.
        """
        self._inlet.release()
        if receive is not None:
            self._awaited.append(receive)
        if send is not None:
            self._outlet.waiting.append((send, zlib.crc32(self.doing.encode())))
        self._outlet.push()

    def land(self) -> Tensor:
        """The oldest segment that was expected, once it has arrived: not the tensor posted, but one like it."""
        like = self._awaited.popleft()
        deadline = time.monotonic() + self._timeout
        while (arrived := self._inlet.take(like, self.doing)) is None:
            self._wait(deadline, self._inlet.read_fd)
        return arrived

    def flush(self) -> None:
        """Return once all that was sent lies in slots."""
        self._inlet.release()
        deadline = time.monotonic() + self._timeout
        while self._outlet.waiting:
            self._wait(deadline)

    def _wait(self, deadline: float, *read_fds: int) -> None:
        """Wait until one of `read_fds` has a word, or a slot is free for a segment that waits to be sent."""
        poll = select.poll()
        for read_fd in (*read_fds, self._outlet.read_fd) if self._outlet.waiting else read_fds:
            poll.register(read_fd, select.POLLIN)
        if not poll.poll(max(0.0, 1e3 * (deadline - time.monotonic()))):
            raise PeerError(f"a neighbour in the ring did not answer within the timeout of {self._timeout:g} s.")
        self._outlet.push()


class _Side:
    """One side of a link: slots of memory, and a pipe in each direction."""

    def __init__(self, memory: mmap.mmap, read_fd: int, write_fd: int) -> None:
        self.slots = torch.frombuffer(memory, dtype=torch.uint8).view(SLOTS, -1).unbind(0)
        self.read_fd, self.write_fd = read_fd, write_fd
        self.count = 0
        """Segments sent or received so far."""
        for pipe in (read_fd, write_fd):
            os.set_blocking(pipe, False)
            weakref.finalize(self, os.close, pipe)

    def slot(self, like: Tensor) -> Tensor:
        """Return the memory of the next segment, as a tensor like `like`."""
        return self.slots[self.count % SLOTS][: like.nbytes].view(like.dtype)

    def read_word(self) -> tuple[int, int] | None:
        """Return the next word of the other side, None if there is none yet."""
        try:
            word = os.read(self.read_fd, _WORD.size)
        except BlockingIOError:
            return None
        if not word:
            raise PeerError("a neighbour in the ring did not answer: its process ended, or it left the ring.")
        return _WORD.unpack(word)


class _Outlet(_Side):
    def __init__(self, memory: mmap.mmap, read_fd: int, write_fd: int) -> None:
        super().__init__(memory, read_fd, write_fd)
        self.waiting: deque[tuple[Tensor, int]] = deque()
        self._under_way = 0

    def push(self) -> None:
        """Send as much of what waits as there are free slots."""
        while self.waiting:
            while self._under_way and self.read_word() is not None:
                self._under_way -= 1
            if self._under_way == SLOTS:
                return
            segment, doing = self.waiting.popleft()
            self.slot(segment).copy_(segment)
            try:
                os.write(self.write_fd, _WORD.pack(segment.nbytes, doing))
            except BrokenPipeError as error:
                raise PeerError("the right neighbour in the ring does not listen: its process ended.") from error
            self.count, self._under_way = self.count + 1, self._under_way + 1


class _Inlet(_Side):
    _used = False

    def take(self, like: Tensor, doing: str) -> Tensor | None:
        """Return the next segment, in the shared memory, if it has arrived."""
        word = self.read_word()
        if word is None:
            return None
        length, theirs = word
        if theirs != zlib.crc32(doing.encode()):
            error = DivergenceError(f"{OTHER_BLOCKS} This rank was at {doing}, and another one was not.")
            error.lightning_3d_alone = True  # type: ignore[attr-defined]  # the ranks agree on nothing any more
            raise error
        if length != like.nbytes:
            raise PeerError(
                f"the left neighbour in the ring sends {length} bytes where {like.nbytes} are expected: the ranks run"
                " different collectives, or their models differ. Code may have skipped a block on some ranks, called"
                " it in a transform of torch.func, or divided its batch by trainer.world_size: all call each block"
                " equally often, with tensors of one shape."
            )
        arrived = self.slot(like)
        self.count, self._used = self.count + 1, True
        return arrived

    def release(self) -> None:
        if self._used:
            self._used = False
            with suppress(BrokenPipeError):  # the neighbour has left after this segment, its last
                os.write(self.write_fd, _WORD.pack(0, 0))


def connect(group: dist.ProcessGroup, slot_bytes: int) -> SharedMemory | None:
    """Link the ranks of `group` in a ring; None unless all are on this machine. Every rank must call it.

    Where something stands in the way (another system than Linux, a sandbox) the ranks agree to do without.
    """
    timeout, size, rank = timeout_of(group), group.size(), group.rank()
    if timeout is None:
        return None
    length = SLOTS * slot_bytes
    memory, their_read_fd, write_fd, read_fd, their_write_fd = _offer(length)
    offer = [_machine() if memory >= 0 else 0, os.getpid(), memory, their_read_fd, their_write_fd]
    table = exchange(torch.tensor(offer), group, tag=2).tolist()
    taken = _take(*table[(rank - 1) % size][1:]) if offer[0] and all(row[0] == offer[0] for row in table) else ()
    linked = bool(exchange(torch.tensor(len(taken)), group, tag=2).all())
    _close(their_read_fd, their_write_fd)  # the neighbour has them now; ours would keep the pipes open once it is gone
    if not linked:
        _close(memory, write_fd, read_fd, *taken)
        return None
    with torch.inference_mode(False):  # the first collective may be one of validation, and training writes here too
        outlet = _Outlet(_mapped(memory, length), read_fd=read_fd, write_fd=write_fd)
        inlet = _Inlet(_mapped(taken[0], length), read_fd=taken[1], write_fd=taken[2])
    return SharedMemory(outlet, inlet, timeout.total_seconds())


def _offer(length: int) -> list[int]:
    """Make memory and both ends of a pipe forth and of one back; all -1 where the system has none."""
    made: list[int] = []
    try:
        if sys.platform == "linux":
            made.append(_unnamed(length))
            made.extend(os.pipe())
            made.extend(os.pipe())
            return made
    except OSError:
        _close(*made)
    return [-1] * 5


def _unnamed(length: int) -> int:
    """A file in memory without a name. Some builds of Python, conda's among them, have no `memfd_create`."""
    if hasattr(os, "memfd_create"):
        memory = os.memfd_create("lightning_3d")
        os.ftruncate(memory, length)
        return memory
    memory = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(memory, 0, length)  # a full /dev/shm is an error now, and would be a SIGBUS later
    except OSError:
        os.close(memory)
        raise
    return memory


def _take(process: int, *descriptors: int) -> Sequence[int]:
    """Our own descriptors of what the neighbour offers: memory, what it says, what it hears; none if we may not."""
    taken: list[int] = []
    try:
        for descriptor, access in zip(descriptors, (os.O_RDWR, os.O_RDONLY, os.O_WRONLY), strict=True):
            taken.append(os.open(f"/proc/{process}/fd/{descriptor}", access))
    except OSError:
        _close(*taken)
        return ()
    return taken


def _mapped(memory: int, length: int) -> mmap.mmap:
    mapped = mmap.mmap(memory, length)
    os.close(memory)
    return mapped


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


def _machine() -> int:
    """Equal for processes that find each other in /proc, 0 where there is no telling."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read()
        return 1 + zlib.crc32(f"{boot} {os.stat('/proc/self/ns/pid').st_ino}".encode())
    except OSError:
        return 0


SEGMENT_BYTES = 3 << 20
"""The longest message: still in cache when it is added to, yet large enough to hide Python's part."""


class RingWire:
    """The connection of a rank to its two neighbours in the ring of `group`. Nothing else may use `group` meanwhile."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self.segment_bytes = SEGMENT_BYTES
        self.doing = ""
        """What the next collective is for, in words. Where ranks share memory, it is compared with the neighbour's."""
        self._shared: SharedMemory | None = None
        self._tried = False

    def begin(self, *, host: bool) -> "SharedMemory | _Messages":
        """The messages of one collective, over tensors in `host` memory or on a device. Every rank must call it."""
        if host:
            return self.shared() or _Messages(self, batched=False)
        return _Messages(self, batched=True)

    def shared(self) -> SharedMemory | None:
        """The memory that the ranks share. None unless all are on one machine. Every rank must call it."""
        if not self._tried:
            self._tried, self._shared = True, connect(self.group, SEGMENT_BYTES)
        if self._shared is not None:
            self._shared.doing = self.doing
        return self._shared

    def meet(self) -> None:
        """Compare what the ranks do, where they share memory. Every rank must call it."""
        if (messages := self.shared()) is not None:
            messages.post(nothing := torch.empty(0), nothing)
            messages.land()
            messages.flush()


class _Messages:
    """The messages of one collective by the process group; each side's order is the same on all ranks."""

    own_memory = False
    """True where a segment arrives in memory of its own, not in the tensor that was posted for it."""

    def __init__(self, wire: RingWire, *, batched: bool) -> None:
        self.group, self.batched = wire.group, batched
        self.right, self.left = (wire.rank + 1) % wire.size, (wire.rank - 1) % wire.size
        self.arriving: deque[tuple[Tensor, Sequence[dist.Work | None]]] = deque()
        self.leaving: list[dist.Work | None] = []

    def post(self, receive: Tensor | None, send: Tensor | None) -> None:
        if self.batched:  # one launch for both, or on NCCL each would wait for the neighbour's other half
            ops = [] if receive is None else [dist.P2POp(dist.irecv, receive, group=self.group, group_peer=self.left)]
            ops += [] if send is None else [dist.P2POp(dist.isend, send, group=self.group, group_peer=self.right)]
            works: Sequence[dist.Work | None] = dist.batch_isend_irecv(ops) if ops else ()
            if receive is not None:
                self.arriving.append((receive, works))
            return
        if receive is not None:
            work = dist.irecv(receive, group=self.group, group_src=self.left)
            self.arriving.append((receive, (work,)))
        if send is not None:
            self.leaving.append(dist.isend(send, group=self.group, group_dst=self.right))

    def land(self) -> Tensor:
        """The oldest segment that was posted, once it has arrived."""
        segment, works = self.arriving.popleft()
        _wait(works)
        return segment

    def flush(self) -> None:
        _wait(self.leaving)


def _wait(works: Sequence[dist.Work | None]) -> None:
    try:
        for work in works:
            if work is not None:
                work.wait()
    except RuntimeError as error:
        raise PeerError(
            f"a neighbour in the ring did not answer: it died, failed, or is slower than the timeout ({error})."
        ) from error
