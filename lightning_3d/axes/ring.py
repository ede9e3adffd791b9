"""Ring collectives over point-to-point sends.

Rank r sends only to r + 1 and receives only from r - 1. A buffer is cut into one chunk per rank, and each chunk into
segments. At hop h rank r sends chunk r - h - 1 and receives chunk r - h - 2 (modulo N).

During the first N - 1 hops partial sums arrive, and the rank adds its own values (reduce-scatter). Then rank r has the
full sum of chunk r. During the next N - 1 hops full sums arrive (all-gather). Both parts together are the all-reduce,
with no pause between them. A rank passes a segment on as soon as it has arrived, so that sends, receives and additions
of different segments overlap. Each of the two parts sends (N - 1) / N of the buffer.

The sum of one chunk is formed along one path and then only copied, so all ranks end with the same bits. Half types
are added in fp32 and rounded once per hop; the last hop adds, divides and rounds once.
"""

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from lightning_3d.axes.ring_wire import RingWire

SMALL_BYTES = 256 << 10
"""Pieces below this are packed: a message costs more than the copies, and a block has a dozen biases and norms."""
WINDOW = 4
"""Receives posted ahead. It bounds the working memory of a reduction to `WINDOW` segments."""
Pieces = Tensor | Sequence[Tensor]
"""Several inputs and as many outputs, of one dtype, travel as one collective."""
_HALVES = (torch.bfloat16, torch.float16)


def ring_reduce_scatter(output: Pieces, input: Pieces, wire: RingWire, *, average: bool = False) -> None:
    """Sum `input` over the ranks of `wire` and write this rank's shard to `output`.

    Args:
        output: contiguous, `input.numel() / N` elements; may be this rank's part of `input`.
        input: contiguous; N equal parts, part r for rank r. **Its contents are lost**: partial sums are formed in it.
        wire: to the neighbours; nothing else uses its process group meanwhile.
    """
    size, inputs, outputs = wire.size, flat(input), flat(output)
    small, large = _small(inputs)
    if small:
        packed = torch.cat([inputs[index].view(size, -1) for index in small], dim=1)
        own = packed[wire.rank]
        targets = [outputs[index] for index in small]
        inputs = [*(inputs[index] for index in large), packed.view(-1)]
        outputs = [*(outputs[index] for index in large), own]
    _turn(inputs, outputs, range(size - 1), wire, average)
    if small:
        for target, part in zip(targets, own.split([target.numel() for target in targets]), strict=True):
            target.copy_(part)


def ring_all_gather(output: Pieces, input: Pieces, wire: RingWire) -> None:
    """Collect every rank's `input`, in rank order, in `output`; as this rank's part of `output` it is not copied."""
    size, inputs, outputs = wire.size, flat(input), flat(output)
    small, large = _small(outputs)
    owns: list[Tensor] = []
    for index in large:
        source, target = inputs[index], outputs[index]
        owns.append(target.narrow(0, wire.rank * source.numel(), source.numel()))
        copy_unless_same(owns[-1], source)
    wholes = [outputs[index] for index in large]
    if small:
        widths = [inputs[index].numel() for index in small]
        packed = inputs[small[0]].new_empty(size, sum(widths))
        owns.append(torch.cat([inputs[index] for index in small], out=packed[wire.rank]))
        wholes.append(packed.view(-1))
    _turn(wholes, owns, range(size - 1, 2 * size - 2), wire, average=False)
    if small:
        for index, part in zip(small, packed.split(widths, dim=1), strict=True):
            outputs[index].view(size, -1).copy_(part)


def ring_all_reduce(buffer: Pieces, wire: RingWire, *, average: bool = False) -> None:
    """Sum (or average) the contiguous `buffer` over the ranks of `wire`, in place.

    Several buffers of one dtype travel as one collective. Where N does not divide the length of one, its last few
    elements travel in a padded piece of N elements.
    """
    size = wire.size
    pieces: list[Tensor] = []
    tails: list[tuple[Tensor, Tensor]] = []
    for piece in flat(buffer):
        even = piece.numel() // size * size
        pieces.append(piece[:even])
        if even < piece.numel():
            padded = piece.new_zeros(size)
            padded[: piece.numel() - even] = piece[even:]
            pieces.append(padded)
            tails.append((piece[even:], padded))
    pieces = [piece for piece in pieces if piece.numel()]
    owns = [piece.view(size, -1)[wire.rank] for piece in pieces]
    _turn(pieces, owns, range(2 * size - 2), wire, average)
    for tail, padded in tails:
        tail.copy_(padded[: tail.numel()])


def ring_swap(output: Sequence[Tensor], input: Sequence[Tensor], wire: RingWire) -> None:
    """Send the flat parts `input` to two ranks, each other's neighbours, and write what each sends here to `output`."""
    other, messages = 1 - wire.rank, wire.begin(host=True)
    most = wire.segment_bytes // input[0].element_size()
    arriving = output[other].split(most)
    for receive, send in zip_longest(arriving, input[other].split(most)):
        messages.post(receive, send)
    output[wire.rank].copy_(input[wire.rank])
    for segment in arriving:
        copy_unless_same(segment, messages.land())
        messages.post(None, None)  # what has arrived is read: its place is free
    messages.flush()


def _turn(flats: Sequence[Tensor], owns: Sequence[Tensor], hops: range, wire: RingWire, average: bool) -> None:
    """Go through `hops` of the ring (see the top of this file), each of `flats` in N chunks; `owns` get the sums."""
    size, rank = wire.size, wire.rank
    chunks, results = _cut(flats, owns, wire)
    if not results or not hops:
        return
    host, count = results[0].device.type == "cpu", len(results)
    ahead = min(WINDOW, len(hops) * count) if host else count
    steps = [(hop, k) for hop in hops for k in range(count)]
    messages = wire.begin(host=host)
    longest = max(result.numel() for result in results)
    spare = hops[0] < size - 1 and not messages.own_memory
    slots = results[0].new_empty(ahead, longest).unbind(0) if spare else ()

    def landing(step: int) -> Tensor | None:
        """Return the memory for the segment of `step`; None after the last step."""
        if step >= len(steps):
            return None
        hop, k = steps[step]
        place = chunks[(rank - hop - 2) % size][k]
        return slots[step % ahead][: place.numel()] if slots and hop < size - 1 else place

    for step in range(max(ahead, count)):
        first = chunks[(rank - hops[0] - 1) % size][step] if step < count else None
        messages.post(landing(step) if step < ahead else None, first)
    for step, (hop, k) in enumerate(steps):
        arrived = messages.land()
        segment = chunks[(rank - hop - 2) % size][k]
        if hop == size - 2:
            segment = _last_add(results[k], arrived, segment, size if average else 1)
        elif hop < size - 2:
            segment.add_(arrived)
        else:
            copy_unless_same(segment, arrived)
        messages.post(landing(step + ahead), segment if hop + 1 in hops else None)
    messages.flush()


def _cut(flats: Sequence[Tensor], owns: Sequence[Tensor], wire: RingWire) -> tuple[list[list[Tensor]], list[Tensor]]:
    """The segments of all chunks, by rank, and those of the results."""
    size = wire.size
    chunks: list[list[Tensor]] = [[] for _ in range(size)]
    results: list[Tensor] = []
    for flat, own in zip(flats, owns, strict=True):
        part = own.numel()
        if part * size != flat.numel():
            raise ValueError(f"{flat.numel()} elements are not {size} parts of {part}.")
        # NCCL cuts messages itself, and each extra one costs a launch.
        count = -(-part * flat.element_size() // wire.segment_bytes) if flat.device.type == "cpu" else min(part, 1)
        if count:
            results.extend(own.tensor_split(min(part, count)))
            for segments, chunk in zip(chunks, flat.view(size, part).unbind(0), strict=True):
                segments.extend(chunk.tensor_split(min(part, count)))
    return chunks, results


def _small(pieces: Sequence[Tensor]) -> tuple[Sequence[int], Sequence[int]]:
    """Return the `pieces` that are packed into one message, and the others."""
    small = [index for index, piece in enumerate(pieces) if piece.numel() * piece.element_size() < SMALL_BYTES]
    if len(small) < 2:
        return (), range(len(pieces))
    return small, [index for index in range(len(pieces)) if index not in small]


def flat(pieces: Pieces) -> list[Tensor]:
    return [piece.view(-1) for piece in ([pieces] if isinstance(pieces, Tensor) else pieces)]


def _last_add(out: Tensor, arrived: Tensor, own: Tensor, divisor: int) -> Tensor:
    """`out = (arrived + own) / divisor`, rounded once."""
    if divisor > 1 and out.dtype in _HALVES:
        return out.copy_(arrived.float().add_(own).div_(divisor))
    torch.add(arrived, own, out=out)
    return out.div_(divisor) if divisor > 1 else out


def copy_unless_same(target: Tensor, source: Tensor) -> None:
    """Copy between tensors that may have the same memory."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)
