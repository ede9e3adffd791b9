"""Calls of metrics on a full batch, from the arguments of its microbatches.

Arguments cannot be joined in general. Their rows may be tokens, or the rest after a mask. A number may be a count, an
extreme or a mean. So a metric is updated once for each microbatch, which adds up to the same state. The value of a
batch (the result of `forward`) is that of a cleared copy.

Two kinds of metrics count updates, not rows, and are updated once: the windows of `Running`, and a `MeanMetric` of one
number (a loss). That number is averaged by the sizes of the microbatches.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.wrappers import Running

from lightning_3d.module.undo import replaced_entries
from lightning_3d.sandbox.record import Arguments, mean_of
from lightning_3d.sandbox.trees import leaves

Pieces = list[tuple[Arguments, int]]
"""Arguments and size of each microbatch."""


def on_full_batch(metric: Any, method: str, pieces: Pieces, scratch: Mapping[int, Any]) -> Callable[..., Any]:
    """A function that calls `metric.forward` or `metric.update` on all of `pieces`, and ignores its own arguments.
    `scratch` has a copy of each metric, by its id, that may be reset.
    """
    own = getattr(metric, method)
    # to many metrics rows that are none (no token of this microbatch is under the mask) are an error
    empty = lambda leaf: isinstance(leaf, Tensor) and leaf.ndim and not len(leaf)  # noqa: E731
    pieces = _joined(metric, [piece for piece in pieces if not any(map(empty, leaves(piece[0])))] or pieces[:1])
    args, kwargs = pieces[0][0]
    if len(pieces) == 1:
        return lambda *_, **__: own(*args, **kwargs)
    inside = _inside(metric)
    if inside:
        of = [(each, [((a, each._filter_kwargs(**k)), size) for (a, k), size in pieces]) for each in inside]

        def through(*_: Any, **__: Any) -> Any:
            with replaced_entries((vars(each), method, on_full_batch(each, method, its, scratch)) for each, its in of):
                return own(*args, **kwargs)

        return through

    def update(*_: Any, **__: Any) -> None:
        for (args, kwargs), _size in pieces:
            own(*args, **kwargs)

    def forward(*_: Any, **__: Any) -> Any:
        copy = cleared(metric, scratch[id(metric)])
        copy._to_sync, copy.dist_sync_fn = metric.dist_sync_on_step, metric.dist_sync_fn
        for (args, kwargs), _size in pieces:
            copy.update(*args, **kwargs)
            metric.update(*args, **kwargs)
        metric._forward_cache = copy.compute()
        copy._to_sync = False
        return metric._forward_cache

    return update if method == "update" else forward


def _joined(metric: Any, pieces: Pieces) -> Pieces:
    """One piece for a mean of one number."""
    numbers = [args[0] for (args, kwargs), _ in pieces if len(args) == 1 and not kwargs and _is_number(args[0])]
    if not isinstance(metric, MeanMetric) or len(numbers) < len(pieces):
        return pieces
    sizes = [size for _, size in pieces]
    return [(((mean_of(numbers, sizes),), {}), sum(sizes))]


def _is_number(value: Any) -> bool:
    return value.ndim == 0 if isinstance(value, Tensor) else isinstance(value, int | float)


def _inside(metric: Any) -> list[Any]:
    """The metrics that this one calls with its own arguments, each once."""
    if isinstance(metric, Running):
        return [metric.base_metric]
    # not `values()`, which changes how members of a compute group share their states
    return list(metric.children()) if isinstance(metric, MetricCollection) else []


def scratch_of(metric: Any) -> Any:
    """A copy of a metric that gathers nothing from other ranks.

    Members of a collection keep states of their own: those that agree on one microbatch need not on another.
    """
    copy = metric.clone()
    for inner in copy.modules():
        if isinstance(inner, MetricCollection):
            inner._enable_compute_groups, inner._groups_checked, inner._groups = False, False, {}
        if isinstance(inner, Metric):
            inner.sync_on_compute = inner.dist_sync_on_step = inner._to_sync = False
    return copy


def cleared(metric: nn.Module, scratch: Any) -> Any:
    """`scratch`, a copy of `metric`, on the device of the metric and reset."""
    for mine, copy in _pairs(metric, scratch):
        if copy.device != mine.device:
            copy.to(mine.device)
    scratch.reset()
    return scratch


def as_far_as(metric: nn.Module, scratch: Any) -> Any:
    """`scratch`, a copy of `metric`, with the current state of the metric."""
    for mine, copy in _pairs(metric, cleared(metric, scratch)):
        for name, value in mine._copy_state_dict().items():
            setattr(copy, name, value)
        copy._update_count = mine._update_count
    return scratch


@contextmanager
def metrics_restored(metrics: Iterable[nn.Module]) -> Iterator[None]:
    """Let metrics run by themselves, on this rank alone, and give them back their states."""
    found = {id(each): each for metric in metrics for each in metric.modules() if isinstance(each, Metric)}
    before = [(each, dict(each.__dict__), each._copy_state_dict()) for each in found.values()]
    for each in found.values():
        each.sync_on_compute = each.dist_sync_on_step = False
    try:
        yield
    finally:
        for each, attributes, states in before:
            each.__dict__.clear()
            each.__dict__.update(attributes)
            for name, value in states.items():
                setattr(each, name, value)


def _pairs(metric: nn.Module, scratch: nn.Module) -> Iterator[tuple[Metric, Metric]]:
    for mine, copy in zip(metric.modules(), scratch.modules(), strict=True):
        if isinstance(mine, Metric) and isinstance(copy, Metric):
            yield mine, copy
