"""Random streams of dataloader workers: noted after each batch, so that a resumed epoch augments as it would have.

Workers run ahead of training. What is saved is each worker's state after the last of its batches that training has had,
which it left in memory that it shares with the main process.
"""

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from lightning_3d.ranks.random_streams import Streams, main_streams, set_main_streams

ROOM = 2**14
"""Bytes for one worker's streams; three generators of some kilobytes."""


class WorkerStreams:
    """Where the random streams of the workers of one dataloader are.

    Args:
        workers: how many there are; the batches of an epoch go around them in turn, beginning with the first.
        ahead: how many batches each makes before they are asked for.
        persistent: whether they live on from one epoch to the next.
    """

    def __init__(self, workers: int, ahead: int, persistent: bool) -> None:
        self.workers, self.persistent = workers, persistent
        self.starts: list[Streams] | None = None
        """What workers that start now go on with; None leaves them as they were seeded."""
        self._before = [0] * workers
        """How many batches each made in earlier epochs of its life."""
        self._states = torch.zeros(workers, ahead + 3, ROOM, dtype=torch.uint8).share_memory_()
        self._made = 0  # of a worker, in its own process

    def begin(self) -> None:
        """In a worker: go on from where another stopped."""
        if self.starts is not None:
            set_main_streams(self.starts[_worker()])
        self._made = 0
        self._note()

    def made(self) -> None:
        """In a worker: another batch is there."""
        self._made += 1
        self._note()

    def _note(self) -> None:
        text = bytearray(pickle.dumps(main_streams()))
        slot = self._slot(_worker(), self._made)
        slot[: len(text)] = torch.frombuffer(text, dtype=torch.uint8)

    def next_epoch(self, dealt: int) -> None:
        """In the main process: an epoch begins, after one of which `dealt` batches were asked for."""
        for worker in range(self.workers):
            self._before[worker] = self._before[worker] + self._share(dealt, worker) if self.persistent else 0

    def restart(self) -> None:
        """In the main process: all workers are started anew."""
        self._before = [0] * self.workers

    def after(self, batches: int) -> list[Streams]:
        """In the main process: the streams after so many batches of the epoch, the one for the next batch first."""
        found = []
        for worker in ((batches + step) % self.workers for step in range(self.workers)):
            made = self._before[worker] + self._share(batches, worker)
            found.append(pickle.loads(self._slot(worker, made).numpy().data))
        return found

    def _share(self, batches: int, worker: int) -> int:
        return max(0, -(-(batches - worker) // self.workers))

    def _slot(self, worker: int, batches: int) -> torch.Tensor:
        return self._states[worker, batches % self._states.shape[1]]


def _worker() -> int:
    info = get_worker_info()
    assert info is not None, "only workers note their streams"
    return int(info.id)


class _Collate:
    def __init__(self, inner: Callable[[Any], Any], streams: WorkerStreams) -> None:
        self.inner, self.streams = inner, streams

    def __call__(self, samples: Any) -> Any:
        batch = self.inner(samples)
        self.streams.made()
        return batch


class _Init:
    def __init__(self, inner: Callable[[int], None] | None, streams: WorkerStreams) -> None:
        self.inner, self.streams = inner, streams

    def __call__(self, worker: int) -> None:
        if self.inner is not None:
            self.inner(worker)
        self.streams.begin()


def note_streams(loader: DataLoader[Any]) -> WorkerStreams | None:
    """Have the workers of `loader` note their streams. None where there are none, or batches come in no fixed order."""
    if loader.num_workers == 0 or not getattr(loader, "in_order", True):
        return None
    streams = WorkerStreams(loader.num_workers, loader.prefetch_factor or 2, loader.persistent_workers)
    loader.collate_fn = _Collate(loader.collate_fn, streams)
    loader.worker_init_fn = _Init(loader.worker_init_fn, streams)
    return streams
