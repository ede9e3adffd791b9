"""`Group`: the ranks of an axis, and their collectives by our ring or by the library."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_3d.axes import ring
from lightning_3d.axes.ledger import Ledger
from lightning_3d.axes.ring import flat
from lightning_3d.axes.ring_wire import RingWire
from lightning_3d.module.torch_private import named_range
from lightning_3d.module.undo import do_nothing
from lightning_3d.ranks.groups import links_of
from lightning_3d.ranks.talk import has_peers

# torch 2.13 renamed these two and warns at the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Group:
    """The ranks of an axis, and their collectives in place. Bytes are counted, and waits have names.

    A group of one rank sends nothing, and neither does one whose other ranks are simulated (a dry run).

    Args:
        ranks: a process group that nothing else uses meanwhile (`dist.new_group`). By default all ranks of the job.
        axis: the name that bytes and waits are counted under.
        ledger: counts calls and bytes, those of a ring also where the library sends, which counts none.
        wire: our ring over `ranks`. None: the library sends (NCCL's ring, gloo's).
        doing: makes the context of a wait, from its name. By default it is one of the step, which the ledger counts.
    """

    simulated = False
    begins = False
    """True where collectives can be under way while this rank goes on."""

    def __init__(
        self,
        ranks: dist.ProcessGroup | None = None,
        axis: str = "all ranks",
        ledger: Ledger | None = None,
        wire: RingWire | None = None,
        doing: Callable[[str], AbstractContextManager[object]] | None = None,
    ) -> None:
        self.ranks: Any = ranks or (dist.group.WORLD if dist.is_initialized() else None)
        self.axis, self.ledger, self.wire = axis, ledger, wire
        self.doing = doing or (named_range if ledger is None else partial(ledger.waiting, axis))
        self.size, self.rank = (1, 0) if self.ranks is None else (self.ranks.size(), self.ranks.rank())
        self.simulated = not has_peers()
        """True in a dry run: tensors have no values to compare."""
        self.silent = self.size == 1 or self.simulated
        self.takes_pieces, self.begins = wire is not None, wire is None and not self.silent
        """True where several tensors can be passed for each of `input` and `output`, and for `buffer`."""
        self.averages = not self.silent and "nccl" in dist.get_backend(self.ranks)
        """True where the library divides sums on the way: gloo would need another pass over them."""
        self._from_host = not self.silent and dist.get_backend(self.ranks) == "gloo"
        """True where messages from rank to rank are read from the host's memory, also those of a device."""

    def reduce_scatter(self, output: ring.Pieces, input: ring.Pieces, *, average: bool = False) -> None:
        """Write this rank's shard of the sum of `input`, whose contents are lost, to `output`."""
        self._count("reduce_scatter", (self.size - 1) * _bytes(output))
        if self.silent:
            _keep(output, input)
            return
        with self.waiting("reduce_scatter"):
            if self.wire is not None:
                ring.ring_reduce_scatter(output, input, self.wire, average=average)
                return
            _reduce_scatter(single(output), single(input), self._sum(average), self.ranks)
        self._divide(output, average)

    def begin_reduce_scatter(self, output: ring.Pieces, input: ring.Pieces) -> Callable[[], None]:
        """Begin the same, and return what waits for it."""
        if not self.begins:
            self.reduce_scatter(output, input)
            return do_nothing
        self._count("reduce_scatter", (self.size - 1) * _bytes(output))
        work = _reduce_scatter(single(output), single(input), dist.ReduceOp.SUM, self.ranks, async_op=True)
        return self._ending("reduce_scatter", work, output, average=False)

    def all_gather(self, output: ring.Pieces, input: ring.Pieces) -> None:
        """Write every rank's `input` in rank order to `output`; `input` may be this rank's shard of it."""
        self._count("all_gather", (self.size - 1) * _bytes(input))
        if self.silent:
            _keep(output, input)
            return
        with self.waiting("all_gather"):
            if self.wire is not None:
                ring.ring_all_gather(output, input, self.wire)
            else:
                _all_gather(single(output), single(input), self.ranks)

    def all_to_all(self, output: Tensor, input: Tensor, receives: Sequence[int], sends: Sequence[int]) -> None:
        """Write what each rank sends here to `output`. Both are flat, with so many elements of each rank."""
        self._count("all_to_all", (input.numel() - sends[self.rank]) * input.element_size())
        if self.silent:
            output.zero_()  # a dry run, whose values nobody reads
            return
        with self.waiting("all_to_all"):
            if self.wire is not None and self.size == 2:
                ring.ring_swap(output.split(list(receives)), input.split(list(sends)), self.wire)
                return
            dist.all_to_all_single(output, input, list(receives), list(sends), self.ranks)

    def places(self, mask: Tensor) -> tuple[Tensor, ...]:
        """The places where `mask` is true, read from the device. In a dry run an even share of all."""
        if not self.simulated:
            return mask.nonzero(as_tuple=True)
        return torch.unravel_index(torch.arange(mask.numel() // self.size, device=mask.device), mask.shape)

    def read_sizes(self, sent: Tensor, got: Tensor, total: int) -> tuple[list[int], list[int]]:
        """The numbers of rows that this rank sends to each and receives from each, read from the device.

        Each rank has as many places, in rank order. In a dry run its `total` rows go evenly to all, and are in `got`.
        """
        if not self.simulated:
            sends, receives = torch.stack([sent, got]).view(2, self.size, -1).sum(2).tolist()
            return sends, receives
        here = len(sent) // self.size
        even = [total // len(sent) + (place < total % len(sent)) for place in range(len(sent))]
        sends = [sum(even[start : start + here]) for start in range(0, len(sent), here)]
        got.view(self.size, here).copy_(torch.tensor(even[self.rank * here : (self.rank + 1) * here]))
        return sends, [sends[self.rank]] * self.size

    def all_reduce(self, buffer: ring.Pieces, *, average: bool = False) -> None:
        """Add `buffer` up over the ranks, in place, to the same bits on each."""
        self.count_all_reduce(buffer)
        if self.silent:
            return
        with self.waiting("all_reduce"):
            if self.wire is not None:
                ring.ring_all_reduce(buffer, self.wire, average=average)
                return
            dist.all_reduce(single(buffer), self._sum(average), self.ranks)
        self._divide(buffer, average)

    def begin_all_reduce(self, buffer: ring.Pieces, *, average: bool = False) -> Callable[[], None]:
        """Begin the same, and return what waits for it."""
        if not self.begins:
            self.all_reduce(buffer, average=average)
            return do_nothing
        self.count_all_reduce(buffer)
        work = dist.all_reduce(single(buffer), self._sum(average), self.ranks, async_op=True)
        return self._ending("all_reduce", work, buffer, average)

    def all_max(self, tensor: Tensor) -> None:
        """Write the largest over the ranks to `tensor`."""
        if not self.silent:
            with self.waiting("all_reduce"):
                dist.all_reduce(tensor, dist.ReduceOp.MAX, self.ranks)
        self.count_all_reduce(tensor)

    def all_rows(self, tensor: Tensor) -> Tensor:
        """The `tensor` of every rank: one row for each."""
        rows = tensor.new_empty((self.size, *tensor.shape))
        self.all_gather(rows.view(-1), tensor.reshape(-1))
        return rows.copy_(tensor) if self.simulated else rows

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Write the `tensor` of rank `source` to that of each rank, and return it."""
        if tensor.numel():
            if not self.silent:
                with self.waiting("broadcast"):
                    dist.broadcast(tensor, group=self.ranks, group_src=source)
            if self.rank == source:
                self.count("broadcast", tensor)
        return tensor

    def begin_send(self, tensor: Tensor, to: int, tag: int) -> Any:
        self.count("send", tensor)
        ranks, peer = self._link(to, tag)
        return dist.isend(self._sent(tensor), group=ranks, group_dst=peer, tag=tag)

    def begin_receive(self, tensor: Tensor, source: int, tag: int) -> Any:
        ranks, peer = self._link(source, tag)
        arriving = self._arriving(tensor)
        work = dist.irecv(arriving, group=ranks, group_src=peer, tag=tag)
        return work if arriving is tensor else _Arrival(work, arriving, tensor)

    def begin_swap(
        self, collective: str, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor], tag: int
    ) -> Callable[[], None]:
        """Begin the messages of a `collective` to some ranks and from some, and return what waits for all."""
        self._count(collective, sum(tensor.nbytes for tensor in sends.values()))
        if self.silent:
            return do_nothing
        message = partial(dist.P2POp, group=self.ranks, tag=tag)
        arriving = {peer: self._arriving(tensor) for peer, tensor in receives.items()}
        messages = [message(dist.irecv, tensor, group_peer=peer) for peer, tensor in arriving.items()]
        messages += [message(dist.isend, self._sent(tensor), group_peer=peer) for peer, tensor in sends.items()]
        works = dist.batch_isend_irecv(messages)

        def end() -> None:
            with self.waiting(collective):
                for work in works:
                    work.wait()
            for peer, tensor in receives.items():
                ring.copy_unless_same(tensor, arriving[peer])

        return end

    def _sent(self, tensor: Tensor) -> Tensor:
        return tensor.cpu() if self._from_host and not tensor.is_cpu else tensor

    def _arriving(self, tensor: Tensor) -> Tensor:
        """The memory that a message for `tensor` is written to."""
        return torch.empty_like(tensor, device="cpu") if self._from_host and not tensor.is_cpu else tensor

    def _link(self, peer: int, tag: int) -> tuple[dist.ProcessGroup, int]:
        """The group for a message with `peer`, and its rank there. Gradients have odd tags."""
        link = links_of(self.ranks).get((peer, tag % 2 == 1))
        return (self.ranks, peer) if link is None else (link, 1 - link.rank())

    def waiting(self, collective: str) -> AbstractContextManager[object]:
        return self.doing(f"{collective} on {self.axis}")

    def count(self, collective: str, tensor: Tensor) -> None:
        self._count(collective, tensor.nbytes)

    def count_all_reduce(self, buffer: ring.Pieces) -> None:
        """Count a sum over the ranks: two passes of a ring, with a shard to each other rank in each."""
        pieces = [buffer] if isinstance(buffer, Tensor) else buffer
        shard = sum(-(-piece.numel() // self.size) * piece.element_size() for piece in pieces)
        self._count("all_reduce", 2 * (self.size - 1) * shard)

    def _count(self, collective: str, sent: int) -> None:
        if self.ledger is not None:
            self.ledger.add(self.axis, collective, sent)

    def _sum(self, average: bool) -> dist.ReduceOp.RedOpType:
        return dist.ReduceOp.AVG if average and self.averages else dist.ReduceOp.SUM

    def _divide(self, total: ring.Pieces, average: bool) -> None:
        if average and not self.averages:
            single(total).div_(self.size)

    def _ending(self, collective: str, work: dist.Work, total: ring.Pieces, average: bool) -> Callable[[], None]:
        def end() -> None:
            with self.waiting(collective):
                work.wait()
            self._divide(total, average)

        return end


class _Arrival:
    """A message for a device that arrives in the host's memory."""

    def __init__(self, work: Any, host: Tensor, target: Tensor) -> None:
        self._work, self._host, self._target = work, host, target

    def wait(self) -> None:
        self._work.wait()
        self._target.copy_(self._host)


def _keep(output: ring.Pieces, input: ring.Pieces) -> None:
    """Write the part of a result that depends on no other rank."""
    for target, source in zip(flat(output), flat(input), strict=True):
        length = min(target.numel(), source.numel())
        ring.copy_unless_same(target[:length], source[:length])


def _bytes(pieces: ring.Pieces) -> int:
    return pieces.nbytes if isinstance(pieces, Tensor) else sum(piece.nbytes for piece in pieces)


def single(pieces: ring.Pieces) -> Tensor:
    """The one tensor that collectives without `takes_pieces` are given."""
    assert isinstance(pieces, Tensor)
    return pieces


def reduced(tensor: Tensor, ranks: Any, op: Any) -> Tensor:
    """Reduce `tensor` in place, as Lightning does. Its own has a barrier, at which a host waits for its GPU."""
    if not dist.is_initialized():
        return tensor
    op = "avg" if op == "mean" else op
    summed = op == "avg" and "nccl" not in dist.get_backend(ranks)  # which divides before it adds
    if isinstance(op, str):
        op = dist.ReduceOp.SUM if summed else getattr(dist.ReduceOp, op.upper())
    dist.all_reduce(tensor, op, ranks)
    if not summed:
        return tensor
    size = dist.get_world_size(ranks)
    return tensor.div_(size) if tensor.is_floating_point() else tensor.copy_(tensor / size)


BUCKET_BYTES = 8 * 2**20
"""Bytes that are copied into one message. Larger tensors travel as they are: copies of them would add to the peak."""


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], group: Group) -> None:
    """Overwrite `tensors` with the values of the first rank of `group`. Shapes must be equal on every rank."""
    for bucket in _buckets(tensors):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            group.broadcast(bucket[0], 0)
            continue
        flat = group.broadcast(torch.cat([tensor.reshape(-1) for tensor in bucket]), 0)
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        bucket: list[Tensor] = []
        for tensor in same:
            if tensor.nbytes > BUCKET_BYTES:
                yield [tensor]
                continue
            if bucket and sum(t.nbytes for t in bucket) + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(tensor)
        if bucket:
            yield bucket
