"""Metrics reduce over the data axis only: tensor and pipeline peers hold the same samples."""

from collections.abc import Iterator
from typing import Any

from torch import distributed as dist
from torch import nn
from torchmetrics import Metric

from lightning_3d.layout import Layout


def use_data_group(module: nn.Module, group: dist.ProcessGroup, layout: Layout) -> list[Metric]:
    """Have every metric of `module` that has no group of its own gather over `group`; returns those changed."""
    if layout.data_parallel_size == layout.world_size:
        return []  # the world is the data axis
    changed = [metric for metric in find_metrics(module) if metric.process_group is None]
    for metric in changed:
        metric.process_group = group
    return changed


def find_metrics(module: nn.Module) -> Iterator[Metric]:
    """Metrics in submodules and in plain attributes, lists, tuples and dicts of them."""
    seen: set[int] = set()
    for submodule in module.modules():
        if isinstance(submodule, Metric):
            yield from _once(submodule, seen)
        for name, value in vars(submodule).items():
            if name not in ("_modules", "_parameters", "_buffers", "_trainer", "_fabric"):
                yield from _search(value, seen, depth=3)


def _search(value: Any, seen: set[int], depth: int) -> Iterator[Metric]:
    if isinstance(value, nn.Module):
        for module in value.modules():
            if isinstance(module, Metric):
                yield from _once(module, seen)
    elif depth and isinstance(value, list | tuple | set):
        for item in value:
            yield from _search(item, seen, depth - 1)
    elif depth and isinstance(value, dict):
        for item in value.values():
            yield from _search(item, seen, depth - 1)


def _once(metric: Metric, seen: set[int]) -> Iterator[Metric]:
    if id(metric) not in seen:
        seen.add(id(metric))
        yield metric
