"""Connections between neighbours of a ring: by the process group, or through shared memory on one machine."""

from collections import deque
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from lightning_3d.axes.shared_memory import SharedMemory, connect
from lightning_3d.errors import PeerError

SEGMENT_BYTES = 3 << 20
"""The longest message: still in cache when it is added to, yet large enough to hide Python's part."""


class RingWire:
    """The connection of a rank to its two neighbours in the ring of `group`. Nothing else may use `group` meanwhile."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self.segment_bytes = SEGMENT_BYTES
        self._shared: SharedMemory | None = None
        self._tried = False

    def begin(self, *, host: bool) -> "SharedMemory | _Messages":
        """The messages of one collective, over tensors in `host` memory or on a device. Every rank must call it."""
        if not host:
            return _Messages(self, batched=True)
        return self.shared() or _Messages(self, batched=False)

    def shared(self) -> SharedMemory | None:
        """The memory that the ranks share. None unless all are on one machine. Every rank must call it."""
        if not self._tried:
            self._tried, self._shared = True, connect(self.group, SEGMENT_BYTES)
        return self._shared


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
        """Start receiving into one tensor and sending another."""
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
        """Wait until all segments have left."""
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
