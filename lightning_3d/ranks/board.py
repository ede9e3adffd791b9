"""Notes of the ranks in the job's store. No rank waits for another: who reads gets the notes that are there."""

import json
from collections.abc import Callable
from typing import Any, TypeVar

from torch import distributed as dist

from lightning_3d.ranks.talk import StoreGone, bounded, job_store

T = TypeVar("T")
PATIENCE = 5.0
"""Seconds for an answer of the store, which a healthy one gives in less than a millisecond."""


class Board:
    """One note of each rank about `subject`, the latest that it wrote. Ranks make boards in the same order."""

    def __init__(self, subject: str) -> None:
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.size = dist.get_world_size() if dist.is_initialized() else 1
        self._mine: Any = None
        self._store = job_store() if self.size > 1 else None
        self._key = ""
        if self._store is not None:
            run = self._ask(lambda store: store.add(f"lightning_3d/{subject}/runs/{self.rank}", 1))
            self._key = f"lightning_3d/{subject}/{run}"  # in the order of runs, so equal on all ranks

    def write(self, note: Any) -> None:
        """Replace the note of this rank. It holds what JSON holds."""
        self._mine = note
        self._ask(lambda store: store.set(f"{self._key}/{self.rank}", json.dumps(note)))

    def read(self) -> dict[int, Any]:
        """The notes of the ranks that have written one. Empty once the store is gone."""
        if self.size == 1:
            return {} if self._mine is None else {0: self._mine}
        return self._ask(self._all) or {}

    def _all(self, store: Any) -> dict[int, Any]:
        keys = {rank: f"{self._key}/{rank}" for rank in range(self.size)}
        if not store.check([*keys.values()]):
            keys = {rank: key for rank, key in keys.items() if store.check([key])}
        notes = store.multi_get([*keys.values()]) if keys else []
        return {rank: json.loads(note) for rank, note in zip(keys, notes, strict=True)}

    def _ask(self, question: Callable[[Any], T]) -> T | None:
        """The answer of the store. It is not asked again once it is gone: the watchdog reports why."""
        store = self._store
        if store is None:
            return None
        try:
            return bounded(lambda: question(store), PATIENCE)
        except (RuntimeError, StoreGone):
            self._store = None
            return None
