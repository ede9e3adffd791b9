"""Jobs of several ranks that have cards, in processes of their own: a process keeps its card until it ends."""

import atexit
import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from tests.device import card, streams
from tests.workers import Pool

_pool = Pool()
atexit.register(_pool.kill)


def run(
    function: Callable[..., Any],
    *args: Any,
    world: int,
    timeout: float = 120.0,
    delays: float = 0.0,
    ends: bool = False,
) -> list[Any]:
    """What `function(*args)` returned on each of `world` ranks. Work is late by up to `delays` seconds. A job that has
    changed its processes `ends` them."""
    job = function.__module__, function.__qualname__, args, delays
    try:
        return _pool.run(_on_a_card, job, world, timeout, False)
    finally:
        if ends:
            _pool.kill()


def _on_a_card(module: str, name: str, args: tuple[Any, ...], delays: float) -> Any:
    card.register()
    streams.DELAYS = delays
    result = getattr(importlib.import_module(module), name)(*args)
    streams.synchronize()
    return tree_map(lambda value: value.cpu() if isinstance(value, Tensor) else value, result)
