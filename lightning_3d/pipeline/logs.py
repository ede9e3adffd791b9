"""What a pipelined `training_step` logs: recorded on the last stage, replayed on every rank.

The last stage runs the step once per microbatch; a user's one call of `self.log` must be one logged value. Values of
the microbatches are averaged by size (or summed, or their extreme taken, as `reduce_fx` says). Metric objects are
given the whole batch at once, on every rank, so their states are equal everywhere and exact.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from lightning_3d.pipeline.microbatch import join_outputs, map_leaves, weighted_mean
from lightning_3d.pipeline.traced import untrace

Logged = tuple[str, Any, dict[str, Any]]
"""Name, value and keyword arguments of a call of `self.log`."""
Update = tuple[str, str, tuple[Any, ...], dict[str, Any]]
"""Name of the metric, "forward" or "update", positional and keyword arguments."""


@dataclass(frozen=True)
class MetricName:
    """Stands for a metric of the module in a record."""

    name: str


@dataclass
class Record:
    """What a step logged and gave to metrics, in order."""

    logged: list[Logged] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)


class LogTap:
    """Takes the place of `module.log` and of the module's metrics while a step runs on a microbatch."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.metrics = dict(_outermost_metrics(module, ""))
        self.names = {id(inner): name for name, inner in module.named_modules() if _is_metric(inner)}
        self.scratch: dict[str, Any] = {}

    @contextmanager
    def recording(self, record: Record, noted: Callable[[Any], None] | None = None) -> Iterator[None]:
        """Calls of `log` and of metrics go to `record`; metrics give the microbatch's value and keep their state.

        `noted` sees every value before anything else does.
        """

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            if noted:
                noted(value)
            names = _LOG_ARGUMENTS[: len(args)]
            record.logged.append((name, self._named(untrace(value)), dict(zip(names, args, strict=True)) | kwargs))

        replaced = [(self.module, "log", log)]
        for name, metric in self.metrics.items():
            if name not in self.scratch:
                self.scratch[name] = metric.clone()
            for method in ("forward", "update"):
                replaced.append((metric, method, self._metric_call(name, method, record, noted)))
        with instead(replaced):
            yield

    def replay(self, record: Record) -> None:
        """Do on this rank what one step on the whole batch would have logged."""
        for name, method, args, kwargs in record.updates:
            getattr(self.metrics[name], method)(*args, **kwargs)
        for name, value, kwargs in record.logged:
            self.module.log(name, self._metric(value), **kwargs)

    def _named(self, value: Any) -> Any:
        if _is_metric(value):
            return MetricName(self.names[id(value)])
        if isinstance(value, dict):
            return {key: self._named(item) for key, item in value.items()}
        return value.detach() if isinstance(value, Tensor) else value

    def _metric(self, value: Any) -> Any:
        if isinstance(value, MetricName):
            return self.module.get_submodule(value.name)
        return {key: self._metric(item) for key, item in value.items()} if isinstance(value, dict) else value

    def _metric_call(
        self, name: str, method: str, record: Record, noted: Callable[[Any], None] | None
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if noted:
                noted((args, kwargs))
            args, kwargs = map_leaves(_detached, untrace(args)), map_leaves(_detached, untrace(kwargs))
            record.updates.append((name, method, args, kwargs))
            self.scratch[name].reset()
            return getattr(self.scratch[name], method)(*args, **kwargs)

        return call


def combine(records: list[Record], sizes: list[int]) -> Record:
    """One record from those of the microbatches, matched call by call."""
    whole = Record()
    for calls in zip(*(record.logged for record in records), strict=False):
        name, value, kwargs = calls[0]
        if kwargs.get("batch_size") is not None:
            kwargs = kwargs | {"batch_size": sum(call[2]["batch_size"] for call in calls)}
        value = _combine([call[1] for call in calls], sizes, kwargs.get("reduce_fx", "mean"))
        whole.logged.append((name, value, kwargs))
    for same in zip(*(record.updates for record in records), strict=False):
        positional = zip(*(update[2] for update in same), strict=True)
        args = tuple(_join(list(column), sizes) for column in positional)
        kwargs = {key: _join([update[3][key] for update in same], sizes) for key in same[0][3]}
        whole.updates.append((same[0][0], same[0][1], args, kwargs))
    return whole


def _join(values: list[Any], sizes: list[int]) -> Any:
    """One argument of a metric. A number that is each microbatch's size becomes the batch's."""
    counts = all(type(value) is int for value in values) and values == sizes
    return sum(sizes) if counts else join_outputs(values, sizes)


def _combine(values: list[Any], sizes: list[int], reduce_fx: Any) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: _combine([value[key] for value in values], sizes, reduce_fx) for key in first}
    if not isinstance(first, Tensor | float | int) or len(values) == 1:
        return first
    name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
    if name in ("sum", "max", "min"):
        stacked = torch.stack([torch.as_tensor(value) for value in values])
        return stacked.sum(0) if name == "sum" else getattr(stacked, f"a{name}")()
    if isinstance(first, Tensor) and not first.is_floating_point():
        values = [value.float() for value in values]
    return weighted_mean(values, [size / sum(sizes) for size in sizes])


@contextmanager
def instead(replacements: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes on instances, and put back what was there."""
    missing = object()
    before = [(owner, name, owner.__dict__.get(name, missing)) for owner, name, _ in replacements]
    for owner, name, value in replacements:
        owner.__dict__[name] = value
    try:
        yield
    finally:
        for owner, name, value in reversed(before):
            if value is missing:
                del owner.__dict__[name]
            else:
                owner.__dict__[name] = value


def _is_metric(value: Any) -> bool:
    return isinstance(value, Metric | MetricCollection)


def _outermost_metrics(module: nn.Module, prefix: str) -> Iterator[tuple[str, Any]]:
    for name, child in module.named_children():
        full = f"{prefix}.{name}" if prefix else name
        if _is_metric(child):
            yield full, child
        else:
            yield from _outermost_metrics(child, full)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


_LOG_ARGUMENTS = (
    "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group",
    "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only",
)  # fmt: skip
