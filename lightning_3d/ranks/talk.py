"""Objects that ranks tell each other.

Tensors travel as plain bytes here: pickle would send each through `torch.save`, which users (and Lightning's tests)
replace on some ranks to see how often a rank saves. Their peers would wait for an answer that cannot be read.

What ranks learn of each other through the job's store, beside any collective, so that no one waits in vain.

Make tensors equal on every rank of a group, many at a time.

What ranks tell each other beside the data: a few integers, at once, out of the engine's order.
"""

import io
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from lightning_3d.errors import PeerError

T = TypeVar("T")
_load = pickle.loads  # as it was when this module was imported, like the Pickler below


class Pickler(pickle.Pickler):
    """Writes tensors by itself, and all else as pickle does."""

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


def gather(mine: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """What every rank of `group` has in the place of `mine`, in the order of ranks. Collective."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, pickled(mine), group=group)
    return [_load(each) for each in everyone]


def from_first(mine: T, group: dist.ProcessGroup | None = None, first: int = 0) -> T:
    """What the first rank of `group` (or the one numbered `first` in it) has in the place of `mine`. Collective."""
    # the others' own might not be picklable, and is not asked for
    box = [pickled(mine) if dist.get_rank(group) == first else b""]
    dist.broadcast_object_list(box, group=group, group_src=first)
    heard = box[0] and dist.get_rank(group) != first  # in a dry run nothing is
    return _load(box[0]) if heard else mine  # type: ignore[no-any-return]


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], raw: bytes, device: str, trained: bool) -> Tensor:
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape).to(device).requires_grad_(trained)


PATIENCE = 60.0
"""Seconds that a rank waits for the others to ask for the same thing."""
PATIENCE_AFTER_ERROR = 5.0
"""Seconds that a failing rank waits for the others to fail too."""


def meet(what: str, ranks: Sequence[int] | None = None) -> None:
    """Return once every rank, or each of `ranks`, is here for `what`; raise a PeerError that names those that did not
    come."""
    store: Any = _get_default_store()
    patience = min(PATIENCE, store.timeout.total_seconds())
    missing = _missing(what, patience, range(dist.get_world_size()) if ranks is None else ranks)
    if missing:
        raise PeerError(
            f"{what} was called on rank {dist.get_rank()} but not on rank {', '.join(map(str, missing))} within"
            f" {patience:.0f} s. What is sharded is gathered from all ranks, so call it on every rank and, where only"
            " one should write, write on rank 0."
        )


def meet_once(what: str, ranks: Sequence[int], met: set[str]) -> None:
    """`meet`, unless `what` is among what they have `met` for before: who comes alone later is not waited for."""
    if what not in met:
        met.add(what)
        meet(what, ranks)


def failed_everywhere(in_step: bool) -> bool:
    """Whether every rank raises now, for a reason of its own.

    After an error that all ranks raise (a user's mistake) the process group is in step and clean-up may still use it;
    after an error of one rank alone, or one that the group itself raised, it must not.

    Args:
        in_step: whether this rank's error came from elsewhere than the process group.
    """
    if not dist.is_initialized():
        return False
    store, mine = _get_default_store(), dist.get_rank()

    def agree() -> bool:
        occasion = _occasion(store, "failure", mine)
        keys = [f"lightning_3d/failure/{occasion}/{rank}" for rank in range(dist.get_world_size())]
        verdict = f"lightning_3d/verdict/{occasion}"
        store.set(keys[mine], "here")
        deadline = time.monotonic() + PATIENCE_AFTER_ERROR
        together = False
        while in_step and not together and not store.check([verdict]) and time.monotonic() < deadline:
            together = store.check(keys)
            time.sleep(0.002)
        # who decides first decides for all: a rank may come just when another gives up
        return bool(store.compare_set(verdict, "", "together" if together else "apart") == b"together")

    try:
        return bounded(agree, 2 * PATIENCE_AFTER_ERROR)
    except (RuntimeError, StoreGone):
        return False  # the rank that serves the store is gone


def leave() -> None:
    """Forget the process group, which is out of step, so that a later run in this process starts afresh.

    Peers that wait for this rank are freed when its process ends, as it does with the error that brought it here.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def bounded(question: Callable[[], T], seconds: float) -> T:
    """The answer to something asked of the store, which never answers while the process that serves it is stopped.

    Raises StoreGone after `seconds`, and what `question` raises.
    """
    answers: list[T] = []
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            answers.append(question())
        except BaseException as error:  # raised again where it was asked
            errors.append(error)

    thread = threading.Thread(target=ask, name="lightning_3d.ask", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise StoreGone(f"the job's store did not answer for {seconds:.0f} s")
    return answers[0]


class StoreGone(Exception):
    """The process that serves the store is stopped or cannot be reached."""


def _missing(what: str, patience: float, ranks: Sequence[int]) -> list[int]:
    """Those of `ranks` that did not announce `what` in time."""
    store: Any = _get_default_store()
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
    """How often this rank has met for `what`, so that every occasion has keys of its own in the store."""
    return int(store.add(f"lightning_3d/{what}/count/{rank}", 1))


BUCKET_BYTES = 64 * 2**20


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Overwrite `tensors` with those of the first rank of `group`. Every rank passes tensors of the same shapes."""
    for bucket in _buckets(tensors):
        if len(bucket) == 1 and bucket[0].is_contiguous():
            dist.broadcast(bucket[0], group=group, group_src=0)
            continue
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.broadcast(flat, group=group, group_src=0)
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
            if bucket and sum(t.nbytes for t in bucket) + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket


_TAG = 1
"""The ring's messages have tag 0, so the two never mix, even on one group and from two threads."""


def exchange(message: Tensor, group: dist.ProcessGroup, tag: int = _TAG) -> Tensor:
    """Every rank's `message` (a CPU tensor of one shape on all ranks), one row per rank.

    Point to point, so it can run while the engine runs collectives on the same group. The group needs a CPU backend
    (start the job's process group with "cpu:gloo,cuda:nccl").
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


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long `group` waits for a peer; None where no gloo is behind it (a dry run, torch's debugging wrapper)."""
    backend = group._get_backend(torch.device("cpu"))
    return backend.options._timeout if isinstance(backend, dist.ProcessGroupGloo) else None
