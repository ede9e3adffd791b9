"""Messages between ranks beside the training data: objects, meetings, small tensors.

`gather`, `all_equal`, `any_rank` and `from_first` are collectives on a process group. `meet` and `failed_everywhere` go
through the job's store instead: they return even if another rank never comes.

Tensors are pickled as plain bytes. pickle would send each through `torch.save`, which users (and Lightning's tests)
replace on some ranks to count how often a rank saves. Their peers could not read the answer.
"""

import hashlib
import io
import pickle
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from lightning_3d.errors import Lightning3DError, PeerError, RunError
from lightning_3d.ranks.process_groups_private import default_store, devices_of, timeout_of

T = TypeVar("T")
_hosts: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
"""A group that refuses CPU tensors -> its ranks on gloo. Opened once, however many runs use it."""
_load = pickle.loads  # bound at import, before a user can replace it, like the Pickler below


class Pickler(pickle.Pickler):
    """Writes tensors as plain bytes, everything else as pickle does."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not Tensor or value.layout != torch.strided or value.is_meta or value.is_quantized:
            return NotImplemented
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tensor, (value.dtype, tuple(value.shape), raw, value.device.type, value.requires_grad)


def pickled(value: Any, pickler: type[pickle.Pickler] = Pickler) -> bytes:
    file = io.BytesIO()
    pickler(file).dump(value)
    return file.getvalue()


def has_peers() -> bool:
    """Return False on the simulated rank of a dry run: no other process answers, and its tensors have no values.

    Messages then bring what this rank says itself. Code that compares values asks its `Group`.
    """
    return not (dist.is_initialized() and dist.get_backend() == "fake")


def place() -> tuple[int, int]:
    """This rank and the number of ranks, 0 and 1 where there is no process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """The `value` of every rank of `group`, in the order of ranks. Collective."""
    if not dist.is_initialized() or not has_peers():
        return [value] * (dist.get_world_size(group) if dist.is_initialized() else 1)
    group = hosts_of(group)
    answers: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(answers, pickled(value), group=group)
    return [_load(answer) for answer in answers]


def all_equal(value: Any, group: dist.ProcessGroup | None = None) -> bool:
    """True where every rank of `group` has the same `value`. Collective.

    It costs one all-reduce of two numbers, where `gather` would bring a message of each rank to each. False for equal
    values that pickle differently, so a caller that gets False has to look.
    """
    digest = int.from_bytes(hashlib.sha256(pickled(value)).digest()[:7], "big")
    largest, least = largest_of([digest, -digest], group)
    return largest == -least


def any_rank(mine: bool) -> bool:
    """True where some rank of the job says so. Collective, and as cheap as `all_equal`."""
    return largest_of([int(mine)])[0] > 0


def largest_of(numbers: list[int], group: dist.ProcessGroup | None = None) -> list[int]:
    """The largest of the numbers that the ranks of `group` say, in each place. Collective."""
    if not dist.is_initialized() or not has_peers():
        return numbers
    group = hosts_of(group) or dist.group.WORLD
    assert group is not None
    device = "cpu" if takes_cpu_tensors(group) else devices_of(group)[0]
    said = torch.tensor(numbers, device=device)
    dist.all_reduce(said, op=dist.ReduceOp.MAX, group=group)
    return said.tolist()


def barrier(device: torch.device) -> None:
    """Return once every rank of the job, which computes on `device`, has called it."""
    if dist.is_initialized():
        on_device = "nccl" in dist.get_backend()  # "cpu:gloo,cuda:nccl" is a name too
        dist.barrier(device_ids=[device.index] if on_device else None)


def from_first(make: Callable[[], T], group: dist.ProcessGroup | None = None, first: int = 0) -> T:
    """The result of `make()` on the first rank of `group` (or on rank `first` of it), on every rank. Collective.

    An error of `make()` is raised on every rank too.
    """
    if not dist.is_initialized() or not has_peers():
        return make()
    group = hosts_of(group)
    if dist.get_rank(group) == first:
        return _made_and_sent(make, group, first)
    box = [b""]
    dist.broadcast_object_list(box, group=group, group_src=first)
    answer, error = _load(box[0])
    if error is not None:
        raise error
    return answer


def _made_and_sent(make: Callable[[], T], group: dist.ProcessGroup | None, first: int) -> T:
    try:
        made = make()
        message = pickled((made, None))
    except Exception as error:
        dist.broadcast_object_list([pickled((None, portable(error)))], group=group, group_src=first)
        raise
    dist.broadcast_object_list([message], group=group, group_src=first)
    return made


def portable(error: Exception) -> Lightning3DError:
    """`error` for other ranks: as it is, or a RunError with its name. Errors of other packages may not be pickled."""
    if not isinstance(error, Lightning3DError):
        error = RunError(f"rank {dist.get_rank()}: {type(error).__name__}: {error}")
    error.rank = dist.get_rank() if error.rank is None else error.rank
    return error


def takes_cpu_tensors(group: dist.ProcessGroup) -> bool:
    """True where `group` has a backend for CPU tensors. Its name does not tell: "cpu:gloo,cuda:nccl" has two."""
    return any(device.type == "cpu" for device in devices_of(group))


def open_hosts(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """`group`, or its ranks on gloo where it refuses CPU tensors, as NCCL does. Every rank of `group` must call it.

    Messages between hosts make no device wait, and no host wait for its device.
    """
    if takes_cpu_tensors(group):
        return group
    if group not in _hosts:
        ranks, wait = dist.get_process_group_ranks(group), timeout_of(group)
        _hosts[group] = dist.new_group(ranks, wait, backend="gloo", use_local_synchronization=True)
    return _hosts[group]


def hosts_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group that `open_hosts` opened for `group`, or `group`."""
    world = group if group is not None else dist.group.WORLD
    assert world is not None
    return _hosts.get(world, group)


def send_numbers(numbers: Sequence[float], source: int, group: dist.ProcessGroup) -> Tensor:
    """Send `numbers` from this rank, `source` of `group`, to the hosts of all others; returns what was sent."""
    message = torch.tensor(numbers, dtype=torch.float64)  # represents every float, and integers up to 2**53
    dist.broadcast(message, group=hosts_of(group), group_src=source)
    return message


def receive_numbers(count: int, source: int, group: dist.ProcessGroup) -> list[float]:
    """The `count` numbers that rank `source` of `group` sends."""
    message = torch.empty(count, dtype=torch.float64)
    if count:
        dist.broadcast(message, group=hosts_of(group), group_src=source)
    return message.tolist()


class PendingMax:
    """A maximum over the ranks of `group`, None for one process. Collective, but only `wait` waits."""

    def __init__(self, numbers: Sequence[int], group: dist.ProcessGroup | None) -> None:
        self._numbers = torch.tensor(numbers)
        self._work = None
        if group is not None and has_peers():
            group = open_hosts(group)
            self._work = dist.all_reduce(self._numbers, op=dist.ReduceOp.MAX, group=group, async_op=True)

    def wait(self) -> list[int]:
        """The largest numbers, once all ranks have given theirs."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._numbers.tolist()


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], raw: bytes, device: str, trained: bool) -> Tensor:
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape).to(device).requires_grad_(trained)


PATIENCE = 60.0
"""Seconds that a rank waits for the others to ask for the same thing."""
PATIENCE_AFTER_ERROR = 5.0
"""Seconds that a failing rank waits for the others to fail too."""


def meet(what: str, ranks: Sequence[int] | None = None) -> None:
    """Return once every rank, or each of `ranks`, has come to `what`.

    Raises a PeerError with the ranks that did not come in time.
    """
    if not has_peers():
        return
    store: Any = default_store()
    patience = min(PATIENCE, store.timeout.total_seconds())
    missing = _missing(what, patience, range(dist.get_world_size()) if ranks is None else ranks)
    if missing:
        raise PeerError(
            f"{what} was called on rank {dist.get_rank()} but not on rank {', '.join(map(str, missing))} within"
            f" {patience:.0f} s. Sharded tensors are gathered from all ranks, so call it on every rank. Where only one"
            " rank should write, write on rank 0."
        )


def meet_once(what: str, ranks: Sequence[int], met: set[str]) -> None:
    """Wait for `ranks` the first time `what` is reached, and note it in `met`. Return at once after that."""
    if what not in met:
        met.add(what)
        meet(what, ranks)


def failed_everywhere(own_error: bool) -> bool:
    """True where every rank fails now, each by an error of its own, which does not come from the process group.

    If all ranks raise (a user's mistake), the process group is in step and clean-up may still use it. After an error of
    one rank, or one that the group itself raised, clean-up must not.
    """
    if not dist.is_initialized() or not has_peers():
        return False
    store, mine = default_store(), dist.get_rank()

    def agree() -> bool:
        occasion = _occasion(store, "failure", mine)
        keys = [f"lightning_3d/failure/{occasion}/{rank}" for rank in range(dist.get_world_size())]
        store.set(keys[mine], "here")
        patience = PATIENCE_AFTER_ERROR if own_error else 0.0
        return decided(store, f"lightning_3d/verdict/{occasion}", lambda: store.check(keys), patience)

    try:
        return bounded(agree, 2 * PATIENCE_AFTER_ERROR)
    except (RuntimeError, StoreGone):
        return False  # the rank that serves the store is gone


def decided(store: Any, verdict: str, arrived: Callable[[], bool], patience: float) -> bool:
    """True if `arrived()` within `patience` seconds. The first verdict counts on all ranks that ask for it: one may
    come just when another gives up."""
    deadline, together = time.monotonic() + patience, False
    while not together and not store.check([verdict]) and time.monotonic() < deadline:
        together = arrived()
        time.sleep(0.002)
    return bool(store.compare_set(verdict, "", "together" if together else "apart") == b"together")


def leave() -> None:
    """Destroy the process group, which is out of step, so that a later run in this process starts with a new one.

    Peers that wait for this rank stop waiting when its process ends, which its error causes.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def bounded(question: Callable[[], T], seconds: float) -> T:
    """The result of `question()`, which asks the store. It never answers while the process that serves it is stopped.

    Raises StoreGone after `seconds`, and any error of `question`.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            answers.append(question())
        except BaseException as error:  # raised again in the thread that asks
            errors.append(error)

    thread = threading.Thread(target=ask, name="lightning_3d.ask", daemon=True)
    thread.start()
    for _ in range(10):  # a machine that stands still for a while takes one of these waits, and not all
        thread.join(seconds / 10)
    if errors:
        raise errors[0]
    if not answers:
        raise StoreGone(f"the job's store did not answer for {seconds:.0f} s")
    return answers[0]


def job_store() -> Any:
    """The store through which the ranks of this job met, None in a dry run."""
    return default_store() if has_peers() else None


class StoreGone(Exception):
    """The process that serves the store is stopped or cannot be reached."""


def _missing(what: str, patience: float, ranks: Sequence[int]) -> list[int]:
    """The ranks among `ranks` that did not announce `what` in time."""
    store: Any = default_store()
    mine = dist.get_rank()

    def announce() -> list[int]:
        occasion = _occasion(store, what, mine)
        keys = {rank: f"lightning_3d/{what}/{occasion}/{rank}" for rank in ranks}
        store.set(keys[mine], "here")
        deadline = time.monotonic() + patience
        while not store.check([*keys.values()]):
            if time.monotonic() > deadline:
                return [rank for rank, key in keys.items() if not store.check([key])]
            time.sleep(0.002)
        return []

    try:
        return bounded(announce, patience + 5.0)
    except (RuntimeError, StoreGone):
        return [rank for rank in ranks if rank != mine]  # the rank that serves the store is gone


def _occasion(store: Any, what: str, rank: int) -> int:
    """The number of this meeting for `what`, so that each meeting has its own keys in the store."""
    return int(store.add(f"lightning_3d/{what}/count/{rank}", 1))


_TAG = 1
"""The ring's messages have tag 0. The two never mix, even on one group and from two threads."""


def exchange(message: Tensor, group: dist.ProcessGroup, tag: int = _TAG) -> Tensor:
    """The `message` of every rank, one row per rank. It is a CPU tensor of one shape on all ranks.

    Point to point, so it can run while the background queue runs collectives on the same group. The group needs a
    backend for CPU tensors (`open_hosts`).
    """
    size, rank = group.size(), group.rank()
    table = message.new_empty((size, *message.shape))
    table[rank] = message
    peers = [peer % size for peer in range(rank + 1, rank + size)]
    works = [dist.irecv(table[peer], group=group, group_src=peer, tag=tag) for peer in peers]
    works += [dist.isend(message, group=group, group_dst=peer, tag=tag) for peer in peers]
    for work in works:
        assert work is not None
        work.wait()
    return table
