"""A background thread that reports the place of this rank in the job's store, and reads those of other ranks.

A process group reports at best that a connection broke, and only to its two ranks. So each rank writes its place about
once a second. The first rank that notices a failure decides the cause once, and all ranks read it.
"""

import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import distributed as dist
from torch.distributed.distributed_c10d import Store

from lightning_3d.errors import PeerError
from lightning_3d.faults.flight_recorder import flight
from lightning_3d.faults.verdict import Verdict, confession, judge
from lightning_3d.launch.first_meeting import agent_serves, read
from lightning_3d.ranks.agreement import is_communication
from lightning_3d.ranks.process_groups_private import default_store
from lightning_3d.ranks.talk import StoreGone, bounded

GRACE = 30.0
"""Seconds that a stuck rank may stay alive once the job has failed."""
STILL = 0.8
"""Part of the timeout after which a rank that does not move writes its record. NCCL aborts the process later."""
LINGER = 10.0
"""Seconds that rank 0 stays for the others once the job has failed."""
EXIT_CODE = 1
_connections: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[Store, Store]] = weakref.WeakKeyDictionary()
"""The job's process group -> this process's connections to its store."""


class Watchdog:
    """Watches the ranks of one run. Every rank makes one, in the same order."""

    def __init__(self, rank: int, places: dict[int, str], *, timeout: float, folder: Path) -> None:
        self._main, self._beside = _open_connections()
        run = self._main.add(f"lightning_3d/watch/runs/{rank}", 1)  # in the order of runs, so equal on all ranks
        self.key = f"lightning_3d/watch/{run}"
        self.rank, self.places, self.folder = rank, places, folder
        self.timeout = timeout
        self.beat = min(max(timeout / 20, 0.2), 1.0)
        self.silence = max(timeout / 2, min(timeout, 5.0))
        self.verdict: Verdict | None = None
        self.known_since = 0.0
        self.failing = False
        self._stop = threading.Event()
        self._answered = time.monotonic()
        self._neighbour, self._changed = b"", time.monotonic()
        self._place, self._moved, self._look = "", time.monotonic(), 0.0
        self._recorded = False
        self._ran, self._slept, self._woke = time.monotonic(), 0.0, 0.0
        """When this process ran last, the seconds that it was stopped before, and the end of those."""
        self._server = b""
        """The last beat of rank 0, which may take the store with it when it dies."""
        self._threads = [
            threading.Thread(target=work, name=f"lightning_3d.{work.__name__.strip('_')}", daemon=True)
            for work in (self._tell, self._guard)
        ]
        for thread in self._threads:
            thread.start()

    def close(self, ended: bool) -> None:
        """Stop watching. Once one rank has `ended` well, no rank is called silent any more."""
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * self.beat)
        if ended:
            with suppress(StoreGone, RuntimeError):  # rank 0 has gone, and its store with it
                self._ask(lambda store: store.set(f"{self.key}/ended", "yes"))
                self._ask(lambda store: store.set(self._knows(self.rank), "yes"))
                self._serve_others()

    def _serve_others(self) -> None:
        """On the rank that serves the store: stay while others, which may predict on longer samples, still write."""
        beats: dict[int, bytes] = {}
        while self.rank == 0 and not agent_serves():
            if self._wait(self.silence, lambda store: store.check([*map(self._knows, self.places)])):
                return
            before, beats = beats, self._ask(self._beats)
            if beats == before:
                return

    # ---- the two threads -------------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Write the place of this rank, and read what happened."""
        count = 0
        while not self._stop.wait(self.beat if count else 0):
            count += 1
            try:
                self._exchange(count)
            except RuntimeError:  # the store is gone: there is no more news
                verdict = self._store_lost()
                self._learn(verdict)
                if not self._stop.wait(2 * self.beat):
                    self._record_once(self._message(self.verdict or verdict, flight.standing()))
                return
            self._answered = time.monotonic()

    def _exchange(self, count: int) -> None:
        store, place = self._beside, flight.standing()
        store.set(self._beat_of(self.rank), json.dumps([count, place, time.time()]))
        if store.check([f"{self.key}/ended"]):
            return
        self._record_before_abort(store, place)
        if self.verdict is None and (known := self._decided(store)) is not None:
            self._learn(known)
        if self.verdict is not None:
            store.set(self._knows(self.rank), "yes")
        self._server = read(store, self._beat_of(0))
        heard = read(store, self._beat_of((self.rank + 1) % len(self.places)))
        if heard != self._neighbour:
            self._neighbour, self._changed = heard, time.monotonic()
        elif self.verdict is None and time.monotonic() - self._changed > self.silence:
            lost = (self.rank + 1) % len(self.places)
            self._post(store, Verdict("lost", {lost: _standing(heard)}))

    def _record_before_abort(self, store: Store, place: str) -> None:
        """Write the record of a main thread that is stuck. An error may never reach it: NCCL aborts the process."""
        now = time.monotonic()
        if place != self._place:
            self._place, self._moved = place, now
            self._recorded = self._recorded and self.verdict is not None
        if self.verdict is not None and now > self.known_since + 2 * self.beat:
            self._record_once(self._message(self.verdict, place))
        elif self.verdict is None and now > max(self._look, self._moved + STILL * self.timeout):
            self._look = now + 5 * self.beat  # it reads the places of all ranks
            places = {rank: _parsed(beat)[0] for rank, beat in self._beats(store).items()}
            if flight.waits or len(set(places.values())) > 1:  # else all ranks are in the same long hook
                seconds = f"Nothing has moved here for {now - self._moved:.0f} s. "
                self._record_once(seconds + self._message(judge({}, places, {}), place))

    def _record_once(self, text: str) -> None:
        if not self._recorded and not self.failing:
            self._recorded = True
            self.record(text)
            print(text, file=sys.stderr, flush=True)

    def _guard(self) -> None:
        """End this process if it cannot end itself. This thread calls nothing that could block."""
        while not self._stop.wait(0.2):
            now = time.monotonic()
            if now - self._ran > self.silence:
                self._slept, self._woke = now - self._ran, now
            self._ran = now
            if self.verdict is None and now - self._answered > self.silence + self.beat and self._threads[0].is_alive():
                self._learn(self._store_lost())
            if self.verdict is not None and not self.failing and now > self.known_since + self._patience(self.verdict):
                self._end(self.verdict)

    def _patience(self, verdict: Verdict) -> float:
        """Seconds in which the collective that the main thread waits in should fail by itself."""
        rest = self.timeout - self.silence if verdict.how == "lost" else 0.0
        return rest + min(GRACE, 2 * self.timeout)  # the collective may begin after the news, on a busy machine

    def _end(self, verdict: Verdict) -> None:
        text = self._message(verdict, flight.standing())
        self.record(text)
        print(f"{text} This process is stuck and ends now.", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)

    # ---- what the main thread asks ---------------------------------------------------------------------------------

    def explained(self, error: BaseException) -> BaseException:
        """The error to raise instead of `error`. If another rank caused it, it names that rank and its place."""
        self.failing = True
        where = flight.failing(error)
        try:
            verdict = self._find(error, where)
        except (StoreGone, RuntimeError):
            verdict = self._store_lost()
        self._learn(verdict)
        with suppress(StoreGone, RuntimeError):
            self._ask(lambda store: store.set(self._knows(self.rank), "yes"))
        assert self.verdict is not None
        if not is_communication(error):
            return error
        text = f"{self._message(self.verdict, where)} ({str(error).splitlines()[0][:300]})"
        self.record(text, where)
        return self.verdict.refusal() or PeerError(text)

    def linger(self) -> None:
        """On the rank that serves the store: stay until the others know what happened."""
        if self.rank == 0 and not agent_serves():
            others = [self._knows(r) for r in self.places if self.verdict is None or r not in self.verdict.ranks]
            with suppress(StoreGone, RuntimeError):  # then no rank is left to wait for
                self._wait(LINGER, lambda s: s.check(others))

    def record(self, error: str, where: str | None = None) -> None:
        """Write the flight record; a disk that does not take it must not hide the error itself."""
        about = {"rank": self.rank, "coordinates": self.places[self.rank], "where": where, "error": error}
        layout = {str(rank): place for rank, place in self.places.items()}
        try:
            flight.write(self.path, **about, ranks=layout if len(layout) <= 64 else len(layout))
        except OSError as problem:
            print(f"The flight record {self.path} cannot be written: {problem}", file=sys.stderr)

    @property
    def path(self) -> Path:
        return self.folder / f"rank-{self.rank:05d}.json"

    # ---- deciding --------------------------------------------------------------------------------------------------

    def _find(self, error: BaseException, where: str) -> Verdict:
        self._ask(lambda s: s.set(self._failure_of(self.rank), where))
        if not is_communication(error):
            return self._ask(lambda s: self._post(s, confession(error, self.rank, where)))
        # a rank that failed by itself, or one that noticed before us, says so within a few beats
        before = self._ask(self._beats)
        if self._wait(3.5 * self.beat, lambda s: self._decided(s) is not None):
            return self._ask(self._decided)
        after, failures = self._ask(self._beats), self._ask(self._failures)
        silent = {r: _standing(b) for r, b in after.items() if before.get(r) == b and r not in failures}
        if not silent:
            everyone = [*map(self._failure_of, self.places)]
            self._wait(min(5.0, self.timeout / 4), lambda s: s.check(everyone) or self._decided(s) is not None)
            failures = self._ask(self._failures)
        standing = {r: _standing(b) for r, b in after.items() if r not in failures and r not in silent}
        return self._ask(lambda s: self._post(s, judge(silent, failures, standing)))

    def _beats(self, store: Store) -> dict[int, bytes]:
        return {rank: read(store, self._beat_of(rank)) for rank in self.places}

    def _failures(self, store: Store) -> dict[int, str]:
        answers = {rank: read(store, self._failure_of(rank)) for rank in self.places}
        return {rank: where.decode(errors="replace") for rank, where in answers.items() if where}

    def _decided(self, store: Store) -> Verdict | None:
        return Verdict.loads(read(store, f"{self.key}/verdict"))

    def _ask(self, question: Callable[[Store], Any]) -> Any:
        """Ask the store, and wait a few seconds at most."""
        return bounded(lambda: question(self._main), 5.0)

    def _wait(self, seconds: float, holds: Callable[[Store], bool]) -> bool:
        deadline = time.monotonic() + seconds
        while not self._ask(holds):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _post(self, store: Store, verdict: Verdict) -> Verdict:
        """Make `verdict` the one of all ranks unless there is one. Return the one that counts."""
        if verdict.how in ("lost", "late", "apart"):
            verdict = self._stopped() or verdict
        holds = Verdict.loads(store.compare_set(f"{self.key}/verdict", "", verdict.dumps()))
        if holds is None:  # the text there is no verdict, and must not hide this one
            store.set(f"{self.key}/verdict", verdict.dumps())
        self._learn(holds or verdict)
        return holds or verdict

    def _learn(self, verdict: Verdict) -> None:
        if self.verdict is None:
            self.verdict, self.known_since = verdict, time.monotonic()

    def _stopped(self) -> Verdict | None:
        """The verdict on this rank itself, where it has just gone on after a stop: others have given it up."""
        now = time.monotonic()
        recent = self._slept if now - self._woke < 2 * self.silence else 0.0
        seconds = max(now - self._ran, recent)
        if seconds <= self.silence or self._stop.is_set():
            return None
        why = f"it did not run for {seconds:.0f} s (a stop signal, a machine that was suspended), so others gave it up"
        return Verdict("stopped", {self.rank: flight.standing()}, why)

    def _store_lost(self) -> Verdict:
        if (stopped := self._stopped()) is not None:
            return stopped
        if agent_serves():
            return Verdict("lost", {}, "the torchrun agent that serves the job's store does not answer any more")
        return Verdict("lost", {0: _standing(self._server)}, "it served the job's store")

    def _message(self, verdict: Verdict, where: str) -> str:
        text = verdict.explain(self.places)
        return (
            f"{text[:1].upper()}{text[1:]}. This is rank {self.rank} ({self.places[self.rank]}), at {where}. What each"
            f" rank did last is in {self.folder}."
        )

    def _beat_of(self, rank: int) -> str:
        return f"{self.key}/beat/{rank}"

    def _failure_of(self, rank: int) -> str:
        return f"{self.key}/failure/{rank}"

    def _knows(self, rank: int) -> str:
        """Set once a rank needs the store no more: it has ended, or fails and has read the cause."""
        return f"{self.key}/knows/{rank}"


def _standing(beat: bytes) -> str:
    """The place of the rank of `beat`, and the age of that message by the clocks of the two machines."""
    place, at = _parsed(beat)
    return place if at is None else f"{place}, {max(0.0, time.time() - at):.0f} s ago"


def _parsed(beat: bytes) -> tuple[str, float | None]:
    """The place of the rank of `beat`, and when it wrote that; None where `beat` is something else."""
    try:
        _, place, at = json.loads(beat)
        return str(place), float(at)
    except (ValueError, TypeError, RecursionError):
        return "an unknown place", None


def _open_connections() -> tuple[Store, Store]:
    """Connections to the job's store for the main thread and for another one, so that one may ask while one blocks.

    All runs of a job share them: the server closes those of an ended run late.
    """
    world = dist.group.WORLD
    assert world is not None
    if world not in _connections:
        store = default_store()  # its server surely runs now
        _connections[world] = (_connection(store), _connection(store))
    return _connections[world]


def _connection(store: Store) -> Store:
    """Another connection to the same store, where it can be had."""
    clone = getattr(store, "clone", None)
    return clone() if clone is not None else store
