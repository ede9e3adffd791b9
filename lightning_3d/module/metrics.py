"""Metrics reduce over the data axis only: tensor and pipeline peers have the same samples."""

from collections.abc import Callable, Iterator
from typing import Any

import torchmetrics.metric
from torch import Tensor, nn
from torch import distributed as dist
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_3d.launch.lightning_private import HOLDERS
from lightning_3d.layout import Layout

_DEFAULT = "gather_all_tensors"
"""The function of `torchmetrics.metric` that gathers for metrics without their own (read in torchmetrics 1.9).

It is replaced, not set on each metric: callbacks and helpers of the user have metrics too, and some are created during
the run. `tests/same/test_metrics.py` fails when torchmetrics renames it.
"""


def gather_over(data: dist.ProcessGroup, layout: Layout) -> Callable[[], None]:
    """Let metrics without their own group gather over `data`; returns a function that undoes it."""
    if layout.peers == 1:
        return lambda: None  # the world is the data axis
    before = getattr(torchmetrics.metric, _DEFAULT)

    def gather(result: Tensor, group: Any = None) -> list[Tensor]:
        return gather_all_tensors(result, group=group if group is not None else data)

    setattr(torchmetrics.metric, _DEFAULT, gather)
    return lambda: setattr(torchmetrics.metric, _DEFAULT, before)


def named_metrics(module: nn.Module) -> Iterator[tuple[str, Metric | MetricCollection]]:
    """Metrics and collections in submodules and in plain attributes, lists, tuples, sets and dicts of them.

    Outer ones come before inner ones. Names are equal on every rank.
    """
    seen: set[int] = set()
    for prefix, submodule in module.named_modules():
        yield from _once(prefix, submodule, seen)
    for prefix, submodule in module.named_modules():
        for name, value in vars(submodule).items():
            if name not in HOLDERS:
                yield from _search(f"{prefix}.{name}" if prefix else name, value, seen, depth=3)


def _search(name: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Metric | MetricCollection]]:
    if isinstance(value, nn.Module):
        for inner, module in value.named_modules(prefix=name):
            yield from _once(inner, module, seen)
    elif depth and isinstance(value, list | tuple | set):
        # the order of a set differs between ranks
        items = sorted(value, key=lambda item: type(item).__name__) if isinstance(value, set) else value
        for index, item in enumerate(items):
            yield from _search(f"{name}.{index}", item, seen, depth - 1)
    elif depth and isinstance(value, dict):
        for key, item in value.items():
            yield from _search(f"{name}.{key}", item, seen, depth - 1)


def _once(name: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, Metric | MetricCollection]]:
    if isinstance(module, Metric | MetricCollection) and id(module) not in seen:
        seen.add(id(module))
        yield name, module
