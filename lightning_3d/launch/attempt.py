"""A store of its own for each attempt of a job that torchrun restarts.

torchrun's agent may serve one store for all attempts, and torch (read in 2.13) takes it for a new one: ranks of the
second attempt read the addresses of dead processes of the first, and gloo fails to connect. Here rank 0 names the
attempt, and everything goes under that name. What earlier attempts left in the store is told apart by numbers drawn at
random: the agents of several nodes need not agree on how often they have restarted.
"""

import os
import time
import uuid
from datetime import timedelta
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from lightning_3d.errors import PeerError

PAUSE = 0.02


def store_of_attempt(environment: ClusterEnvironment, rank: int, world: int, timeout: timedelta) -> dict[str, Any]:
    """Arguments for `init_process_group`; none where no agent serves a store over several attempts."""
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not served or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) == 0 or world == 1:
        return {}
    store = TCPStore(environment.main_address, environment.main_port, world, is_master=False, timeout=timeout)
    deadline = time.monotonic() + timeout.total_seconds()
    own = uuid.uuid4().hex
    name = _announce(store, own, world, deadline) if rank == 0 else _ask(store, own, rank, deadline)
    return {"store": PrefixStore(f"lightning_3d/attempt/{name}", store)}


def _announce(store: TCPStore, name: str, world: int, deadline: float) -> str:
    """On rank 0: answer every rank that asks until each has taken the name."""
    missing = list(range(1, world))
    while missing:
        for rank in missing:
            if store.check([_key("asks", rank)]):
                store.set(_key("answer", rank), store.get(_key("asks", rank)).decode() + name)
        time.sleep(PAUSE)
        missing = [rank for rank in missing if _read(store, _key("taken", rank)) != name]
        _check(deadline, missing)
    return name


def _ask(store: TCPStore, own: str, rank: int, deadline: float) -> str:
    """On another rank: the name with which rank 0 answers the number drawn just now."""
    store.set(_key("asks", rank), own)
    while not (answer := _read(store, _key("answer", rank))).startswith(own):
        time.sleep(PAUSE)
        _check(deadline, [0])
    name = answer.removeprefix(own)
    store.set(_key("taken", rank), name)
    return name


def _read(store: TCPStore, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _check(deadline: float, missing: list[int]) -> None:
    if missing and time.monotonic() > deadline:
        raise PeerError(f"ranks {missing[:8]} have not joined this attempt of the job in time.")


def _key(what: str, rank: int) -> str:
    return f"lightning_3d/attempts/{what}/{rank}"
