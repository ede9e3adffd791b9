"""The three collectives of the data axis behind one small interface, each call counted in the ledger."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from lightning_3d.comm.ledger import Ledger
from lightning_3d.comm.ring import Pieces, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from lightning_3d.comm.ring_wire import RingWire
from lightning_3d.faults import Doing, flight

# torch 2.13 renamed these two and warns at the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Collectives(ABC):
    """Reduce-scatter, all-gather and all-reduce over `group`.

    Args:
        group: a process group that nothing else uses meanwhile (`dist.new_group`).
        ledger: where calls and bytes are counted.
        axis: the name they are counted under.
    """

    takes_pieces = False
    """True where several tensors can be passed for each of `input` and `output`, and for `buffer`."""

    def __init__(self, group: dist.ProcessGroup, ledger: Ledger, axis: str) -> None:
        self.group, self.ledger, self.axis = group, ledger, axis
        self.size, self.rank = group.size(), group.rank()

    @abstractmethod
    def reduce_scatter(self, output: Pieces, input: Pieces, *, average: bool) -> None:
        """Write this rank's shard of the sum of `input`, whose contents are lost, to `output`."""

    @abstractmethod
    def all_gather(self, output: Pieces, input: Pieces) -> None:
        """Write every rank's `input` in rank order to `output`; `input` may be this rank's shard of it."""

    @abstractmethod
    def all_reduce(self, buffer: Pieces, *, average: bool) -> None:
        """Add `buffer` up over the ranks, in place."""

    def begin_all_reduce(self, buffer: Pieces, *, average: bool) -> Callable[[], None]:
        """Begin to add `buffer` up, and return what waits for it. Here the sum is complete when this returns."""
        self.all_reduce(buffer, average=average)
        return lambda: None

    def doing(self, collective: str) -> Doing:
        return flight.doing(f"{collective} on {self.axis}")

    def count(self, collective: str, sent: int) -> None:
        self.ledger.add(self.axis, collective, sent)


class Ring(Collectives):
    """Our ring (see `comm/ring.py`)."""

    takes_pieces = True

    def __init__(self, group: dist.ProcessGroup, ledger: Ledger, axis: str) -> None:
        super().__init__(group, ledger, axis)
        self.wire = RingWire(group)

    def reduce_scatter(self, output: Pieces, input: Pieces, *, average: bool) -> None:
        with self.doing("reduce_scatter"):
            self.count("reduce_scatter", ring_reduce_scatter(output, input, self.wire, average=average))

    def all_gather(self, output: Pieces, input: Pieces) -> None:
        with self.doing("all_gather"):
            self.count("all_gather", ring_all_gather(output, input, self.wire))

    def all_reduce(self, buffer: Pieces, *, average: bool) -> None:
        with self.doing("all_reduce"):
            self.count("all_reduce", ring_all_reduce(buffer, self.wire, average=average))


class Native(Collectives):
    """The library's own collectives (NCCL's ring, gloo's). Bytes are counted as a ring would send them."""

    def __init__(self, group: dist.ProcessGroup, ledger: Ledger, axis: str) -> None:
        super().__init__(group, ledger, axis)
        self.averages = "nccl" in dist.get_backend(group)
        """True where the library divides sums on the way: gloo would need another pass over them."""

    def reduce_scatter(self, output: Pieces, input: Pieces, *, average: bool) -> None:
        output, input = single(output), single(input)
        with self.doing("reduce_scatter"):
            _reduce_scatter(output, input, op=self._sum(average), group=self.group)
        self._divide(output, average)
        self.count("reduce_scatter", (self.size - 1) * _bytes(output))

    def all_gather(self, output: Pieces, input: Pieces) -> None:
        output, input = single(output), single(input)
        with self.doing("all_gather"):
            _all_gather(output, input, group=self.group)
        self.count("all_gather", (self.size - 1) * _bytes(input))

    def all_reduce(self, buffer: Pieces, *, average: bool) -> None:
        self.begin_all_reduce(buffer, average=average)()

    def begin_all_reduce(self, buffer: Pieces, *, average: bool) -> Callable[[], None]:
        tensor = single(buffer)
        work = dist.all_reduce(tensor, op=self._sum(average), group=self.group, async_op=True)
        self.count("all_reduce", 2 * (self.size - 1) * _bytes(tensor) // self.size)

        def end() -> None:
            with self.doing("all_reduce"):
                if work is not None:
                    work.wait()
            self._divide(tensor, average)

        return end

    def _sum(self, average: bool) -> dist.ReduceOp.RedOpType:
        return dist.ReduceOp.AVG if average and self.averages else dist.ReduceOp.SUM

    def _divide(self, tensor: Tensor, average: bool) -> None:
        if average and self.size > 1 and not self.averages:
            tensor.div_(self.size)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def single(pieces: Pieces) -> Tensor:
    """The one tensor that collectives without `takes_pieces` are given."""
    assert isinstance(pieces, Tensor)
    return pieces
