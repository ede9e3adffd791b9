"""`Group`: the ranks of an axis, and their collectives by our ring or by the library."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch.distributed as dist
from torch import Tensor

from lightning_3d.axes.ledger import Ledger
from lightning_3d.axes.ring import Pieces, copy_unless_same, flat, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from lightning_3d.axes.ring_wire import RingWire
from lightning_3d.ranks.groups import has_peers
from lightning_3d.ranks.named_range_private import named_range

# torch 2.13 renamed these two and warns at the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Group:
    """The ranks of an axis, and their collectives in place. Bytes are counted, and waits have names.

    A group of one rank sends nothing, and neither does one whose other ranks are simulated (a dry run).

    Args:
        ranks: a process group that nothing else uses meanwhile (`dist.new_group`).
        axis: the name that bytes and waits are counted under.
        ledger: where calls and bytes are counted: those of a ring, also where the library sends, which does not tell.
        wire: our ring over `ranks`. None: the library sends (NCCL's ring, gloo's).
        doing: makes the context of a wait, from its name. By default it is one of the step, which the ledger counts.
    """

    begins = False
    """True where collectives can be under way while this rank goes on."""

    def __init__(
        self,
        ranks: dist.ProcessGroup,
        axis: str = "",
        ledger: Ledger | None = None,
        wire: RingWire | None = None,
        doing: Callable[[str], AbstractContextManager[object]] | None = None,
    ) -> None:
        self.ranks, self.axis, self.ledger, self.wire = ranks, axis, ledger, wire
        self.doing = doing or (named_range if ledger is None else partial(ledger.waiting, axis))
        self.size, self.rank = ranks.size(), ranks.rank()
        self.silent = self.size == 1 or not has_peers()
        self.begins = wire is None and not self.silent
        self.averages = "nccl" in dist.get_backend(ranks)
        """True where the library divides sums on the way: gloo would need another pass over them."""

    @property
    def takes_pieces(self) -> bool:
        """True where several tensors can be passed for each of `input` and `output`, and for `buffer`."""
        return self.wire is not None

    def reduce_scatter(self, output: Pieces, input: Pieces, *, average: bool = False) -> None:
        """Write this rank's shard of the sum of `input`, whose contents are lost, to `output`."""
        self.count("reduce_scatter", _bytes(output))
        if self.silent:
            _keep(output, input)
            return
        with self.waiting("reduce_scatter"):
            if self.wire is not None:
                ring_reduce_scatter(output, input, self.wire, average=average)
                return
            _reduce_scatter(single(output), single(input), self._sum(average), self.ranks)
        self._divide(output, average)

    def begin_reduce_scatter(self, output: Pieces, input: Pieces, *, average: bool = False) -> Callable[[], None]:
        """Begin the same, and return what waits for it."""
        if not self.begins:
            self.reduce_scatter(output, input, average=average)
            return _nothing
        self.count("reduce_scatter", _bytes(output))
        work = _reduce_scatter(single(output), single(input), self._sum(average), self.ranks, async_op=True)
        return self._ending("reduce_scatter", work, output, average)

    def all_gather(self, output: Pieces, input: Pieces) -> None:
        """Write every rank's `input` in rank order to `output`; `input` may be this rank's shard of it."""
        self.count("all_gather", _bytes(input))
        if self.silent:
            _keep(output, input)
            return
        with self.waiting("all_gather"):
            if self.wire is not None:
                ring_all_gather(output, input, self.wire)
            else:
                _all_gather(single(output), single(input), self.ranks)

    def all_reduce(self, buffer: Pieces, *, average: bool = False) -> None:
        """Add `buffer` up over the ranks, in place, to the same bits on each."""
        self.count_all_reduce(buffer)
        if self.silent:
            return
        with self.waiting("all_reduce"):
            if self.wire is not None:
                ring_all_reduce(buffer, self.wire, average=average)
                return
            dist.all_reduce(single(buffer), self._sum(average), self.ranks)
        self._divide(buffer, average)

    def begin_all_reduce(self, buffer: Pieces, *, average: bool = False) -> Callable[[], None]:
        """Begin the same, and return what waits for it."""
        if not self.begins:
            self.all_reduce(buffer, average=average)
            return _nothing
        self.count_all_reduce(buffer)
        work = dist.all_reduce(single(buffer), self._sum(average), self.ranks, async_op=True)
        return self._ending("all_reduce", work, buffer, average)

    def all_max(self, tensor: Tensor) -> None:
        """Write the largest over the ranks to `tensor`."""
        if not self.silent:
            with self.waiting("all_reduce"):
                dist.all_reduce(tensor, dist.ReduceOp.MAX, self.ranks)
        self.count_all_reduce(tensor)

    def waiting(self, collective: str) -> AbstractContextManager[object]:
        """Name what this rank waits for."""
        return self.doing(f"{collective} on {self.axis}")

    def count(self, collective: str, shard: int, passes: int = 1) -> None:
        """Count a collective. A ring sends a shard, of so many bytes, to each other rank in each pass."""
        if self.ledger is not None:
            self.ledger.add(self.axis, collective, passes * (self.size - 1) * shard)

    def count_all_reduce(self, buffer: Pieces) -> None:
        """Count a sum over the ranks, which has two passes."""
        pieces = [buffer] if isinstance(buffer, Tensor) else buffer
        self.count("all_reduce", sum(-(-piece.numel() // self.size) * piece.element_size() for piece in pieces), 2)

    def _sum(self, average: bool) -> dist.ReduceOp.RedOpType:
        return dist.ReduceOp.AVG if average and self.averages else dist.ReduceOp.SUM

    def _divide(self, total: Pieces, average: bool) -> None:
        if average and not self.averages:
            single(total).div_(self.size)

    def _ending(self, collective: str, work: dist.Work, total: Pieces, average: bool) -> Callable[[], None]:
        def end() -> None:
            with self.waiting(collective):
                work.wait()
            self._divide(total, average)

        return end


def _keep(output: Pieces, input: Pieces) -> None:
    """What a rank has of a result that depends on no other rank."""
    for target, source in zip(flat(output), flat(input), strict=True):
        length = min(target.numel(), source.numel())
        copy_unless_same(target[:length], source[:length])


def _bytes(pieces: Pieces) -> int:
    return pieces.nbytes if isinstance(pieces, Tensor) else sum(piece.nbytes for piece in pieces)


def _nothing() -> None:
    """Waits for nothing."""


def single(pieces: Pieces) -> Tensor:
    """The one tensor that collectives without `takes_pieces` are given."""
    assert isinstance(pieces, Tensor)
    return pieces
