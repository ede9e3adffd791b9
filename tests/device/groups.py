"""Messages of the card: a backend that behaves as NCCL does, on gloo underneath.

It refuses host tensors. A call returns before its work is done: each communicator has a thread that does the work in
the order of the calls, late by up to `streams.DELAYS`. Ranks that call other collectives on one communicator fail with
both names. A message is under way until its receiver asks for it, and tags count for nothing.
"""

import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.device import card, order, streams, waits

BACKEND = "cardnccl"
_Work: Any = dist.Work
_batch = dist.batch_isend_irecv


class OrderError(RuntimeError):
    """Ranks of one communicator called other collectives, or messages of another size."""


def register() -> None:
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")  # torch 2.15 records messages of backends of its own alone
    dist.Backend.register_backend(BACKEND, _open, devices=["card"])
    dist.batch_isend_irecv = _batch_isend_irecv  # torch's own begins one by one on a backend in Python


def _open(store: Any, rank: int, size: int, timeout: timedelta) -> "CardGroup":
    return CardGroup(dist.PrefixStore("host", store), rank, size, timeout)


class CardWork(_Work):
    """A call whose work may be under way."""

    def __init__(self, done: Any, results: Sequence[Tensor], moment: order.Moment) -> None:
        super().__init__()
        self._done, self._results, self._moment = done, list(results), moment

    def wait(self, timeout: timedelta | None = None) -> bool:
        streams.current().wait_for(self._done, self._moment)
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        if done := bool(self._done.done()):
            order.host_waits(self._moment)
        return done

    def result(self) -> list[Tensor]:
        return self._results

    def get_future(self) -> Any:
        waits.note("get_future")
        self._done.result()
        order.host_waits(self._moment)
        future: Any = torch.futures.Future()
        future.set_result(self._results)
        return future


class CardGroup(dist.ProcessGroup):
    """One communicator."""

    supports_splitting = supports_coalescing = False

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._host = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._lane, self._clock = streams.Lane(), order.Clock()
        self.collectives = 0

    def __repr__(self) -> str:
        return f"CardGroup(rank {self.rank()} of {self.size()})"

    # ---- what torch asks of a group --------------------------------------------------------------------------------

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("card")]

    def _get_backend(self, device: torch.device) -> Any:
        if device.type != "card":
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self

    def getBackendName(self) -> str:
        return BACKEND

    _get_backend_name = name = getBackendName

    def getRank(self) -> int:
        return self._host.rank()

    def getSize(self) -> int:
        return self._host.size()

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    def getGroupDesc(self) -> str:
        return self._desc

    def _get_sequence_number_for_group(self) -> int:
        """Collectives so far, in the order of the host. NCCL counts messages apart."""
        return self.collectives

    def _set_sequence_number_for_group(self) -> None:
        """It begins at 0."""

    def __del__(self) -> None:
        self._lane.end()

    def set_timeout(self, timeout: timedelta) -> None:
        self._host.set_timeout(timeout)

    _set_default_timeout = set_timeout

    # ---- order -----------------------------------------------------------------------------------------------------

    def _begin(self, written: Sequence[Tensor], read: Sequence[Tensor], work: Callable[[], Any]) -> CardWork:
        """Have the communicator's thread do `work`, behind what the stream of the caller has to do first."""
        for tensor in (*written, *read):
            if tensor.device.type != "card":
                raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")
        stream = streams.current()
        before = stream.end()
        self._clock.follow(stream.clock.now())
        self._clock.begin()
        card.use(read, self._clock, False, "a message")
        card.use(written, self._clock, True, "a message")

        def run() -> None:
            if before is not None:
                before.result()
            work()

        return CardWork(self._lane.put(run), written, self._clock.now())

    def _collective(
        self,
        what: str,
        written: Sequence[Tensor],
        read: Sequence[Tensor],
        work: Callable[[], Any],
        same_size: bool = True,
    ) -> CardWork:
        call = f"{what} of {sum(tensor.numel() for tensor in read)} {read[0].dtype}" if same_size and read else what

        def run() -> None:
            self._compare(call)
            work()

        self.collectives += 1
        return self._begin(written, read, run)

    def _compare(self, call: str) -> None:
        """Refuse a collective that other ranks do not call here."""
        mine = torch.zeros(128, dtype=torch.uint8)
        text = call.encode()[:128]
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        table = [torch.empty_like(mine) for _ in range(self.size())]
        self._host.allgather([table], [mine]).wait()
        calls = [bytes(row.tolist()).rstrip(b"\0").decode() for row in table]
        if len(set(calls)) > 1:
            raise OrderError(f"ranks of one communicator call {calls}, where one order is needed")

    # ---- collectives -----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> CardWork:
        op = opts.reduceOp if hasattr(opts, "reduceOp") else opts or dist.ReduceOp.SUM
        hosts = list(map(_host, tensors))

        def run() -> None:
            for host in hosts:
                self._sum(host, op)

        return self._collective(f"all_reduce({_kind(op)[0]})", tensors, tensors, run)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> CardWork:
        return self.allreduce(tensors, opts)

    def _sum(self, host: Tensor, op: Any) -> None:
        kind, factor = _kind(op)
        if factor is not None:
            host.mul_(factor)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.SUM if kind in ("AVG", "PREMUL_SUM") else op
        wide = host.float() if host.dtype in (torch.bfloat16, torch.float16) else host
        self._host.allreduce([wide], options).wait()
        if kind == "AVG":
            wide.div_(self.size())
        if wide is not host:
            host.copy_(wide)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> CardWork:
        root = opts.rootRank if hasattr(opts, "rootRank") else opts
        (host,) = map(_host, tensors)
        options = dist.BroadcastOptions()
        options.rootRank = root
        return self._collective(
            f"broadcast({root})", tensors, tensors, lambda: self._host.broadcast([_bytes(host)], options).wait()
        )

    def reduce(self, tensors: list[Tensor], opts: Any) -> CardWork:
        hosts, root = list(map(_host, tensors)), opts.rootRank

        def run() -> None:
            for host in hosts:
                total = host.clone()
                self._sum(total, opts.reduceOp)
                if self.rank() == root:
                    host.copy_(total)

        return self._collective(f"reduce({root})", tensors, tensors, run)

    def _gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> CardWork:
        rows = [list(map(_host, row)) for row in outputs]
        hosts = list(map(_host, inputs))

        def run() -> None:
            for row, host in zip(rows, hosts, strict=True):
                gathered = [torch.empty_like(host) for _ in row]
                self._host.allgather([list(map(_bytes, gathered))], [_bytes(host)]).wait()
                for target, source in zip(row, gathered, strict=True):
                    target.copy_(source.view_as(target))

        return self._collective("all_gather", [each for row in outputs for each in row], inputs, run)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> CardWork:
        return self._gather(outputs, inputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> CardWork:
        return self._gather([output.view(-1).chunk(self.size())], [input])

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> CardWork:
        return self._gather([output.view(-1).chunk(self.size()) for output in outputs], inputs)

    _allgather_base, allgather_into_tensor_coalesced = all_gather_single, all_gather_single_coalesced

    def _scatter_sums(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> CardWork:
        op = opts.reduceOp if hasattr(opts, "reduceOp") else dist.ReduceOp.SUM
        hosts, rows = list(map(_host, outputs)), [list(map(_host, row)) for row in inputs]

        def run() -> None:
            for host, row in zip(hosts, rows, strict=True):
                total = torch.cat([each.reshape(-1) for each in row])
                self._sum(total, op)
                sizes = [each.numel() for each in row]
                host.copy_(total.split(sizes)[self.rank()].view_as(host))

        return self._collective(
            f"reduce_scatter({_kind(op)[0]})", outputs, [each for row in inputs for each in row], run
        )

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> CardWork:
        return self._scatter_sums(outputs, inputs, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> CardWork:
        return self._scatter_sums([output], [input.view(-1).chunk(self.size())], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> CardWork:
        return self._scatter_sums(outputs, [input.view(-1).chunk(self.size()) for input in inputs], opts)

    _reduce_scatter_base, reduce_scatter_tensor_coalesced = reduce_scatter_single, reduce_scatter_single_coalesced

    def all_to_all_single(
        self, output: Tensor, input: Tensor, receives: list[int], sends: list[int], opts: Any = None
    ) -> CardWork:
        out, into = _host(output), _host(input)

        def run() -> None:
            got = torch.empty(out.shape, dtype=out.dtype)
            self._host.alltoall_base(got, into.clone(), list(receives), list(sends)).wait()
            out.copy_(got)

        return self._collective("all_to_all", [output], [input], run, same_size=False)

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> CardWork:
        waits.note("barrier")
        return self._collective("barrier", [], [], lambda: self._host.barrier().wait())

    # ---- messages --------------------------------------------------------------------------------------------------

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> CardWork:
        (host,) = map(_host, tensors)
        return self._begin([], tensors, lambda: self._send(host, peer))

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> CardWork:
        (host,) = map(_host, tensors)
        return self._begin(tensors, [], lambda: self._receive(host, peer))

    def _send(self, host: Tensor, peer: int) -> None:
        """Done when the receiver has it: a communicator does nothing else meanwhile."""
        head = torch.tensor([host.numel(), zlib.crc32(str(host.dtype).encode())])
        self._host.send([head], peer, 1).wait()
        self._host.send([_bytes(host)], peer, 2).wait()
        self._host.recv([torch.empty(1, dtype=torch.uint8)], peer, 3).wait()

    def _receive(self, host: Tensor, peer: int) -> None:
        head = torch.empty(2, dtype=torch.int64)
        self._host.recv([head], peer, 1).wait()
        if head.tolist() != [host.numel(), zlib.crc32(str(host.dtype).encode())]:
            raise OrderError(f"{host.numel()} of {host.dtype} awaited from {peer}, which sends {int(head[0])}")
        got = torch.empty(host.shape, dtype=host.dtype)
        self._host.recv([_bytes(got)], peer, 2).wait()
        host.copy_(got)
        self._host.send([torch.zeros(1, dtype=torch.uint8)], peer, 3).wait()

    def batch(self, messages: Sequence[Any]) -> list[CardWork]:
        """Messages that wait for no other of them, as one call."""
        lines: dict[tuple[bool, int], list[Callable[[], Any]]] = {}
        tensors: dict[bool, list[Tensor]] = {True: [], False: []}
        for message in messages:
            sends, peer, host = message.op is dist.isend, message.group_peer, _host(message.tensor)
            tensors[sends].append(message.tensor)
            lines.setdefault((sends, peer), []).append(partial(self._send if sends else self._receive, host, peer))

        def run() -> None:
            with ThreadPoolExecutor(len(lines)) as threads:
                for each in [threads.submit(_in_turn, line) for line in lines.values()]:
                    each.result()

        return [self._begin(tensors[False], tensors[True], run)]


def _in_turn(tasks: Sequence[Callable[[], Any]]) -> None:
    for task in tasks:
        task()


def _batch_isend_irecv(messages: list[Any]) -> list[Any]:
    group = messages[0].group or dist.group.WORLD
    return group.batch(messages) if isinstance(group, CardGroup) else _batch(messages)


def _kind(op: Any) -> tuple[str, Any]:
    """The name of a sum, and the factor before it."""
    value, factor = dist.ReduceOp(op).__getstate__() if isinstance(op, dist.ReduceOp.RedOpType) else op.__getstate__()
    return dist.ReduceOp.RedOpType(value).name, factor


def _host(tensor: Tensor) -> Tensor:
    return card.on_host(tensor) if card.is_ours(tensor) else tensor


def _bytes(host: Tensor) -> Tensor:
    """Gloo does not know every type."""
    return host.reshape(-1).view(torch.uint8)
