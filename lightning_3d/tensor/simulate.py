"""All ranks of a tensor axis in one process: threads that take turns and meet at the collectives.

Exactly one thread runs at a time, until it waits in a collective. So code that is not thread-safe (a user's module,
global generators) is safe here, and every run is the same. Backward on CPU runs in the thread that called it.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_3d.axes.group import Group, single
from lightning_3d.axes.ring import Pieces
from lightning_3d.tensor.axis import Axis

T = TypeVar("T")


class _Broken(Exception):
    """Another shard failed, so this shard's collective cannot complete."""


class _Table:
    """Exchange of the threads' contributions to collectives, in turns."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.condition = threading.Condition()
        self.turn = 0
        self.done = [False] * size
        self.posted: dict[int, tuple[str, Any]] = {}
        self.taken = 0
        self.failure: BaseException | None = None

    def exchange(self, rank: int, what: str, value: Any) -> list[Any]:
        """The values of all ranks, when all are posted."""
        with self.condition:
            if any(self.done):
                self.fail(RuntimeError(f"one shard ended while another waits in {what}"))
                raise _Broken
            self.posted[rank] = (what, value)
            self._pass_on(rank)
            self._wait(lambda: self.turn == rank and len(self.posted) == self.size)
            kinds = {kind for kind, _ in self.posted.values()}
            if len(kinds) > 1:
                self.fail(RuntimeError(f"the shards met in different collectives: {sorted(kinds)}"))
                raise _Broken
            values = [self.posted[peer][1] for peer in range(self.size)]
            self.taken += 1
            if self.taken == self.size:
                self.posted, self.taken = {}, 0
            else:
                self._pass_on(rank)
                self._wait(lambda: self.turn == rank and self.taken == 0)
            return values

    def start(self, rank: int) -> None:
        with self.condition:
            self._wait(lambda: self.turn == rank)

    def finish(self, rank: int) -> None:
        with self.condition:
            self.done[rank] = True
            if self.posted and self.failure is None:
                self.fail(RuntimeError("one shard ended while another waited in a collective"))
            self._pass_on(rank)

    def fail(self, error: BaseException) -> None:
        with self.condition:
            self.failure = self.failure or error
            self.condition.notify_all()

    def _pass_on(self, rank: int) -> None:
        self.turn = (rank + 1) % self.size
        self.condition.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> None:
        self.condition.wait_for(lambda: self.failure is not None or ready())
        if self.failure is not None:
            raise _Broken


class ThreadGroup(Group):
    """One simulated rank. It posts copies, because its tensors may change before other ranks read them."""

    def __init__(self, table: _Table, rank: int) -> None:
        self.table, self.rank, self.size = table, rank, table.size
        self.summed = 0
        """Number of elements that `all_reduce` summed."""

    def all_reduce(self, buffer: Pieces, *, average: bool = False) -> None:
        self.summed += single(buffer).numel()
        single(buffer).copy_(_total(self._values("all_reduce", buffer)))

    def all_max(self, tensor: Tensor) -> None:
        tensor.copy_(torch.stack(self._values("all_max", tensor)).amax(dim=0))

    def all_gather(self, output: Pieces, input: Pieces) -> None:
        single(output).copy_(torch.cat(self._values("all_gather", input)))

    def reduce_scatter(self, output: Pieces, input: Pieces, *, average: bool = False) -> None:
        peers = [peer.view(self.size, *single(output).shape) for peer in self._values("reduce_scatter", input)]
        single(output).copy_(_total([peer[self.rank] for peer in peers]))

    def all_to_all(self, output: Tensor, input: Tensor, receives: Sequence[int], sends: Sequence[int]) -> None:
        rows = self.table.exchange(self.rank, "all_to_all", [part.clone() for part in input.split(list(sends))])
        output.copy_(torch.cat([row[self.rank] for row in rows]))

    def _values(self, what: str, mine: Pieces) -> list[Tensor]:
        return self.table.exchange(self.rank, what, single(mine).clone())


def _total(tensors: list[Tensor]) -> Tensor:
    return sum(tensors[1:], tensors[0].clone())


def run_shards(size: int, job: Callable[[Axis], T]) -> list[T]:
    """Run `job(axis)` on each of `size` simulated ranks and raise the first failure."""
    table = _Table(size)
    results: dict[int, T] = {}
    threads_before = torch.get_num_threads()

    def serve(rank: int) -> None:
        torch.set_num_threads(threads_before)  # this setting is of the thread, not of the process
        try:
            table.start(rank)
            results[rank] = job(Axis(ThreadGroup(table, rank)))
            table.finish(rank)
        except _Broken:
            return
        except BaseException as error:
            table.fail(error)

    threads = [threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if table.failure is not None:
        failure, table.failure = table.failure, None  # else the error and its shards would wait for the collector
        try:
            raise failure
        finally:
            del failure
    return [results[rank] for rank in range(size)]
