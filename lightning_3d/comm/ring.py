"""Ring collectives over point-to-point sends.

Rank r sends only to r + 1 and receives only from r - 1. A buffer is cut into one chunk per rank, and each chunk into
segments. At hop h rank r sends chunk r - h - 1 and receives chunk r - h - 2 (modulo N): during the first N - 1 hops
what arrives is a partial sum, to which the rank's own values are added (reduce-scatter); after them rank r holds the
whole sum of chunk r, and during the next N - 1 hops what arrives is final (all-gather). The two in a row are the
all-reduce, with no pause in between. A segment travels on as soon as it has arrived, so that the sends, receives and
additions of different segments overlap. Each of the two parts sends (N - 1) / N of the buffer.

The sum of one chunk is formed along one path and then only copied, so all ranks end with the same bits. Half types
are added in fp32 and rounded once per hop; the last hop adds, divides and rounds once.
"""

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.errors import PeerError

SEGMENT_BYTES = 1 << 20
"""Small enough that a segment is still in cache when it is added to, large enough to hide Python's part."""
WINDOW = 4
"""Receives posted ahead. It bounds the working memory of a reduction to `WINDOW` segments."""
_HALVES = (torch.bfloat16, torch.float16)


def ring_reduce_scatter(
    output: Tensor,
    input: Tensor,
    group: dist.ProcessGroup,
    *,
    average: bool = False,
    segment_bytes: int = SEGMENT_BYTES,
) -> int:
    """Sum `input` over the ranks of `group` and write this rank's part to `output`. Returns the bytes sent.

    Args:
        output: contiguous, `input.numel() / N` elements; may be this rank's part of `input`.
        input: contiguous; N equal parts, part r for rank r. **Its contents are lost**: partial sums are formed in it.
        group: a process group that nothing else uses meanwhile.
        average: divide by the number of ranks.
        segment_bytes: upper bound of one message.
    """
    size = group.size()
    if size == 1:
        _copy_unless_same(output.view(-1), input.view(-1))
        return 0
    return _turn(input.view(-1), output.view(-1), range(size - 1), group, average, segment_bytes)


def ring_all_gather(
    output: Tensor, input: Tensor, group: dist.ProcessGroup, *, segment_bytes: int = SEGMENT_BYTES
) -> int:
    """Collect every rank's `input`, in rank order, in `output`. Returns the bytes sent.

    Args:
        output: contiguous, N times as long as `input`.
        input: contiguous; may be this rank's part of `output`, which saves a copy.
        group: a process group that nothing else uses meanwhile.
        segment_bytes: upper bound of one message.
    """
    size, flat = group.size(), output.view(-1)
    own = flat.narrow(0, group.rank() * input.numel(), input.numel())
    _copy_unless_same(own, input.view(-1))
    return _turn(flat, own, range(size - 1, 2 * size - 2), group, False, segment_bytes)


def ring_all_reduce(
    buffer: Tensor, group: dist.ProcessGroup, *, average: bool = False, segment_bytes: int = SEGMENT_BYTES
) -> int:
    """Sum (or average) the contiguous `buffer` over `group`, in place. Returns the bytes sent.

    Where N does not divide the length, only the last few elements are copied to a padded buffer of N elements.
    """
    size, flat = group.size(), buffer.view(-1)
    if size == 1:
        return 0
    rest = flat.numel() % size
    body, tail = flat[: flat.numel() - rest], flat[flat.numel() - rest :]
    sent = _reduce_and_gather(body, group, average, segment_bytes)
    if rest:
        padded = flat.new_zeros(size)
        padded[:rest] = tail
        sent += _reduce_and_gather(padded, group, average, segment_bytes)
        tail.copy_(padded[:rest])
    return sent


def _reduce_and_gather(flat: Tensor, group: dist.ProcessGroup, average: bool, segment_bytes: int) -> int:
    size = group.size()
    part = flat.numel() // size
    own = flat.narrow(0, group.rank() * part, part)
    return _turn(flat, own, range(2 * size - 2), group, average, segment_bytes)


def _turn(flat: Tensor, own: Tensor, hops: range, group: dist.ProcessGroup, average: bool, segment_bytes: int) -> int:
    """Go through `hops` of the ring (see the top of this file) with `flat` as N chunks; `own` gets the sum."""
    size, rank = group.size(), group.rank()
    part = flat.numel() // size
    if part * size != flat.numel() or own.numel() != part:
        raise ValueError(f"{flat.numel()} elements are not {size} parts of {own.numel()}.")
    if not part or not hops:
        return 0
    host = flat.device.type == "cpu"
    # NCCL cuts messages itself, and each extra one costs a launch.
    count = min(part, -(-part * flat.element_size() // segment_bytes)) if host else 1
    ahead = WINDOW if host else 1
    chunks: list[Sequence[Tensor]] = [chunk.tensor_split(count) for chunk in flat.view(size, part).unbind(0)]
    result = own.tensor_split(count)
    steps = [(hop, k) for hop in hops for k in range(count)]
    slots = [torch.empty_like(chunks[0][0]) for _ in range(ahead)] if hops[0] < size - 1 else []
    wire = _Wire(group, batched=not host)

    def landing(step: int) -> Tensor | None:
        """Where the segment of `step` is received; None after the last step."""
        if step >= len(steps):
            return None
        hop, k = steps[step]
        place = chunks[(rank - hop - 2) % size][k]
        return slots[step % ahead][: place.numel()] if hop < size - 1 else place

    for step in range(max(ahead, count)):
        first = chunks[(rank - hops[0] - 1) % size][step] if step < count else None
        wire.post(landing(step) if step < ahead else None, first)
    for step, (hop, k) in enumerate(steps):
        arrived = wire.land()
        segment = chunks[(rank - hop - 2) % size][k]
        if hop == size - 2:
            segment = _last_add(result[k], arrived, segment, size if average else 1)
        elif hop < size - 2:
            segment.add_(arrived)
        wire.post(landing(step + ahead), segment if hop + 1 in hops else None)
    wire.flush()
    return len(hops) * part * flat.element_size()


class _Wire:
    """The messages to the right neighbour and from the left one; each side's order is the same on all ranks."""

    def __init__(self, group: dist.ProcessGroup, *, batched: bool) -> None:
        size, rank = group.size(), group.rank()
        self.group, self.right, self.left, self.batched = group, (rank + 1) % size, (rank - 1) % size, batched
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
        """Wait until all that was sent has left."""
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


def _last_add(out: Tensor, arrived: Tensor, own: Tensor, divisor: int) -> Tensor:
    """`out = (arrived + own) / divisor`, rounded once."""
    if divisor > 1 and out.dtype in _HALVES:
        return out.copy_(arrived.float().add_(own).div_(divisor))
    torch.add(arrived, own, out=out)
    return out.div_(divisor) if divisor > 1 else out


def _copy_unless_same(target: Tensor, source: Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
