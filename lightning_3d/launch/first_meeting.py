"""The first meeting of the ranks of a job: a store for each attempt, and the ranks that did not come to it.

torchrun's agent may serve one store for all attempts, and torch (read in 2.13) assumes a new one. Ranks of the second
attempt then read the addresses of dead processes of the first, and gloo fails to connect. Here rank 0 names the
attempt, and all keys begin with that name. Random numbers identify the keys of earlier attempts, since the agents of
several nodes need not agree on the number of restarts.
"""

import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from torch import distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from lightning_3d.errors import PeerError

PATIENCE = 300.0
"""Seconds, at least, that ranks have to start: a queue, an import from a slow disk or a download takes minutes."""
LAST_WORDS = 2.0
SHORTEST_PAUSE, LONGEST_PAUSE, GROWTH = 0.001, 0.1, 1.2
"""Seconds between two looks at the store. They grow with the time that has passed: most ranks start together."""
LONGEST_ATTEMPT = 5.0
"""Seconds until an attempt to connect counts as failed, where a network drops it."""
HERE = "all are here"


def store_of_attempt(environment: ClusterEnvironment, rank: int, world: int, timeout: timedelta) -> dict[str, Any]:
    """Arguments for `init_process_group`: a store at which all ranks are. Raises a PeerError that names who is not.
    `timeout` is that of what ranks ask of the store later on.
    """
    if world == 1:
        return {}
    place = f"{environment.main_address}:{environment.main_port}"
    patience = max(timeout.total_seconds(), PATIENCE)
    deadline = time.monotonic() + patience
    served = agent_serves()
    if rank > 0:
        _await_server(environment.main_address, environment.main_port, deadline)
    try:
        store = TCPStore(
            environment.main_address, environment.main_port, world, is_master=rank == 0 and not served,
            timeout=timedelta(seconds=max(1.0, deadline - time.monotonic())), wait_for_workers=False,
            multi_tenant=not served,
        )  # fmt: skip
        name = _announce(store, world, deadline) if rank == 0 else _join(store, rank, deadline)
    except dist.DistError as error:
        if rank == 0:
            raise
        serves = "torchrun's agent" if served else "rank 0"
        raise PeerError(
            f"{serves}, which serves the job's store at {place}, did not come to the start of the job within"
            f" {patience:.0f} s, or left it: {error}"
        ) from error
    store.set_timeout(timeout)
    return {"store": PrefixStore(f"lightning_3d/attempt/{name}", store)}


def _await_server(address: str, port: int, deadline: float) -> None:
    """Return once the store listens, or at the deadline. torch's client (2.13) waits up to a second to try again."""
    pauses = _pauses()
    while (left := deadline - time.monotonic()) > 0 and not _listens(address, port, min(left, LONGEST_ATTEMPT)):
        time.sleep(next(pauses))


def _listens(address: str, port: int, timeout: float) -> bool:
    """Return True where a connection to `port` can be opened. It is closed at once."""
    with suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as own:
                own.settimeout(timeout)
                own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # another job may listen here in a minute
                own.bind(("", 0))
                if own.getsockname()[1] != port:  # a socket that has the port connects to itself, and rank 0 loses it
                    own.connect(place)
                    return True
    return False


def _announce(store: TCPStore, world: int, deadline: float) -> str:
    """On rank 0: answer every rank that asks until each has taken the name; say that all are here, or who is not."""
    name, missing, pauses = uuid.uuid4().hex, list(range(1, world)), _pauses()
    while missing and time.monotonic() < deadline:
        for rank in missing:
            if store.check([_key("asks", rank)]):
                store.set(_key("answer", rank), store.get(_key("asks", rank)).decode() + name)
        time.sleep(next(pauses))
        missing = [rank for rank in missing if read(store, _key("taken", rank)).decode() != name]
    message = _late(missing, world) if missing else HERE
    store.set(_key(name, 0), message)
    if missing:
        time.sleep(LAST_WORDS)  # the store ends with this process, and the others have to read why
        raise PeerError(message)
    return name


def _join(store: TCPStore, rank: int, deadline: float) -> str:
    """On another rank: the name with which rank 0 answers the number drawn just now, once all ranks have theirs."""
    own = uuid.uuid4().hex
    store.set(_key("asks", rank), own)
    answer = _await(store, _key("answer", rank), deadline, own)
    name = answer.removeprefix(own)
    store.set(_key("taken", rank), name)
    message = _await(store, _key(name, 0), deadline + PATIENCE)  # rank 0 may have come later, and waits as long
    if message != HERE:
        raise PeerError(message)
    return name


def _await(store: TCPStore, key: str, deadline: float, start: str = "") -> str:
    """The text that rank 0 writes to `key`, once it begins with `start`."""
    pauses = _pauses()
    while not (message := read(store, key).decode()) or not message.startswith(start):
        if time.monotonic() > deadline:
            raise PeerError("rank 0 did not come to the start of the job. Its own log says why.")
        time.sleep(next(pauses))
    return message


def _pauses() -> Iterator[float]:
    pause = SHORTEST_PAUSE
    while True:
        yield pause
        pause = min(GROWTH * pause, LONGEST_PAUSE)


def _late(missing: list[int], world: int) -> str:
    named = ", ".join(map(str, missing[:8])) + (", ..." if missing[8:] else "")
    return (
        f"rank {named} of {world} did not come to the start of the job in time. Either its process was not started or"
        " has ended (its own log says why), or its machine does not reach the address of rank 0."
    )


def read(store: Any, key: str) -> bytes:
    """The value of `key`, empty where no rank has set it."""
    return store.get(key) if store.check([key]) else b""


def agent_serves() -> bool:
    """Return True if torchrun serves the store, so that it outlives rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _key(what: str, rank: int) -> str:
    return f"lightning_3d/attempts/{what}/{rank}"
