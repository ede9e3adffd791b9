"""Metrics reduce over the data axis only: tensor and pipeline peers hold the same samples."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch import distributed as dist
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_3d.layout import Layout


def use_data_group(module: nn.Module, group: dist.ProcessGroup, layout: Layout) -> list[Metric]:
    """Have every metric of `module` that has no group of its own gather over `group`; returns those changed."""
    if layout.data_parallel_size == layout.world_size:
        return []  # the world is the data axis

    def gather(tensor: Tensor, **_: object) -> list[Tensor]:
        return gather_all_tensors(tensor, group=group)

    changed = [
        metric for metric in find_metrics(module) if metric.process_group is None and metric.dist_sync_fn is None
    ]
    for metric in changed:
        # a function, not `metric.process_group`: users copy metrics and modules, and a group cannot be copied
        metric.dist_sync_fn = gather
    return changed


def use_whole_world(metrics: list[Metric]) -> None:
    """Undo `use_data_group`."""
    for metric in metrics:
        metric.dist_sync_fn = None


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
