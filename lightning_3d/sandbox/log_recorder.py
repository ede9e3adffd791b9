"""Records what a step logs and prints, and its calls of metrics; replays them on every rank.

The last stage of a pipeline runs the step once per microbatch. One call of `self.log` must become one logged value,
and one call of a metric must become one call on the full batch. This happens on every rank, so that the states of
metrics are equal everywhere. A result of `forward` or `compute` that is logged unchanged is that of the replay.

Real loggers exist on rank 0 only, so stand-ins record their calls, and every rank carries these out. A
`trainer.should_stop = True` is recorded too: all ranks have to stop together.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import MaxMetric, Metric, MetricCollection, MinMetric, SumMetric

from lightning_3d.errors import NO_PIPELINE, UnsupportedError
from lightning_3d.launch.lightning_private import trainer_of
from lightning_3d.module.metrics import named_metrics
from lightning_3d.module.undo import replaced_entries
from lightning_3d.ranks.rank_zero import acting_as_rank_zero
from lightning_3d.sandbox.metric_replay_private import as_far_as, cleared, metrics_restored, on_full_batch, scratch_of
from lightning_3d.sandbox.record import Computed, MetricName, Record, RecordedCall, unpacked
from lightning_3d.sandbox.trees import detached, map_leaves, tensors_at, untrace

RecordCall = Callable[[str, tuple[Any, ...], dict[str, Any]], None]
"""Records a call: its name, then (the route to the function, its arguments) and its keyword arguments."""
Route = tuple[tuple[str, Any], ...]
"""Attributes and items that lead from the list of loggers to the function."""
_STOP: Route = (("stop", None),)


class RecordedLoggers:
    """Stands for an attribute of a logger; a call is recorded, and returns None as on ranks without loggers."""

    _record: RecordCall
    _path: Route

    def __init__(self, record_call: RecordCall, path: Route) -> None:
        self.__dict__.update(_record=record_call, _path=path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._then("attribute", name)

    def __getitem__(self, key: Any) -> Any:
        return self._then("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._then("attribute", "__setitem__")(key, value)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._record(".".join(str(name) for _, name in self._path), (self._path, args), kwargs)

    def _then(self, kind: str, name: Any) -> "RecordedLoggers":
        return RecordedLoggers(self._record, (*self._path, (kind, name)))


class LoggerStandIn:
    """A logger whose method calls are recorded; its plain attributes (`name`, `version`, `log_dir`) are its own."""

    def __init__(self, logger: Any, record_call: RecordCall, index: int) -> None:
        self.__dict__.update(_logger=logger, _recorded=RecordedLoggers(record_call, (("item", index),)))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._logger)  # steps ask isinstance(self.logger, TensorBoardLogger)

    def __getattr__(self, name: str) -> Any:
        if name == "experiment":  # reading the real one may start it
            return self._recorded.experiment
        value = getattr(self._logger, name)
        return getattr(self._recorded, name) if callable(value) else value


@contextmanager
def recorded_trainer(module: Any, record_call: RecordCall) -> Iterator[None]:
    """Replace the Trainer's loggers by stand-ins, and record that it should stop."""
    trainer = trainer_of(module)
    if trainer is None:
        yield
        return
    real, stops = trainer.loggers, trainer.should_stop
    trainer.loggers = [LoggerStandIn(logger, record_call, index) for index, logger in enumerate(real)]
    try:
        yield
        if trainer.should_stop and not stops:
            record_call("should_stop", (_STOP, ()), {})
    finally:
        trainer.loggers, trainer.should_stop = real, stops


def do(trainer: Any, path: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if path == _STOP:
        trainer.should_stop = True
        return
    target: Any = trainer.loggers
    for kind, name in path:
        target = getattr(target, name) if kind == "attribute" else target[name]
    target(*args, **kwargs)


_METHODS = ("forward", "update", "compute", "reset")


class LogRecorder:
    """Takes the place of `module.log` and of the module's metrics while a step runs on a microbatch. Logging raises
    where `inside_block` is True: only the rank that runs the block would log.
    """

    def __init__(self, module: Any, inside_block: Callable[[], bool] = lambda: False) -> None:
        self.module, self.inside_block = module, inside_block
        self.modules: list[Any] | None = None
        self.metrics: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        self.roots: dict[str, str] = {}
        """By name, the outermost metric that a metric belongs to: a collection for its members."""
        self.scratch: dict[int, Any] = {}
        """A copy of each metric, by the metric's id, for values that must not change its state."""
        self.find_metrics()

    def find_metrics(self) -> None:
        """Find the module's metrics again: a step may have new ones in each epoch, as with `MetricTracker`.

        Metrics in plain attributes are found only once: such attributes may be large.
        """
        found = [each for each in self.module.modules() if isinstance(each, Metric | MetricCollection)]
        if self.modules is not None and list(map(id, found)) == list(map(id, self.modules)):
            return
        self.modules, self.metrics, self.roots, self.scratch = found, dict(named_metrics(self.module)), {}, {}
        self.names = {id(metric): name for name, metric in self.metrics.items()}
        for name in self.metrics:
            self.roots[name] = next((root for root in self.roots if name.startswith(f"{root}.")), name)

    @contextmanager
    def recording(
        self,
        record: Record,
        noted: Callable[[Any], None] | None = None,
        *,
        speaks: bool = False,
        own_metrics: bool = False,
    ) -> Iterator[None]:
        """Send calls of `log`, `print`, loggers and metrics to `record`; metrics return values of the microbatch.

        The states of metrics do not change.

        Args:
            speaks: True where this rank acts as rank 0; else no rank does.
            own_metrics: metrics run as their author wrote them; afterwards they have their states from before. A run
                that proves another one must not share the replacements that the other one computes with.
        """
        returned: dict[int, Computed] = {}

        def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            self._refuse_inside("log", name)
            if noted:
                noted(value)
            names = _LOG_ARGUMENTS[: len(args)]
            given = dict(zip(names, args, strict=True)) | kwargs
            record.add("log", name, (self._named(value, returned),), given)

        def recording_of(what: str) -> RecordCall:
            def recorded(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                if noted:
                    noted((args, kwargs))
                record.add(what, name, detached(untrace(args)), detached(untrace(kwargs)))

            return recorded

        def recorder_of(name: str, method: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self._refuse_inside(method, name)
                if noted:
                    noted((args, kwargs))
                args, kwargs = untrace(args), untrace(kwargs)
                noted_args, noted_kwargs = map_leaves(_detached, args), map_leaves(_detached, kwargs)
                # a loss may be what a metric's forward returns: it keeps its graph, what is replayed does not
                keeps_graph = method == "forward" and torch.is_grad_enabled()
                given = (args, kwargs) if keeps_graph else (noted_args, noted_kwargs)
                value = self._on_microbatch(name, method, given[0], given[1], record)
                made = record.add(method, name, noted_args, noted_kwargs)
                for path, leaf in tensors_at(value):
                    returned[id(leaf)] = Computed(made.key, path, leaf)  # keeps the leaf, so that its id stays its own
                return value

            return call

        every = [(name, metric, method) for name, metric in self.metrics.items() for method in _METHODS]
        if own_metrics:
            replacements = [
                (vars(metric), method, self._watched(metric, name, method, returned, record))
                for name, metric, method in every
            ]
        else:
            self._copy_metrics()
            replacements = [(vars(metric), method, recorder_of(name, method)) for name, metric, method in every]
        say, own = recording_of("print"), vars(self.module)
        replacements += [(own, "log", log), (own, "print", lambda *args, **kwargs: say("", args, kwargs))]
        restored = metrics_restored(self.metrics.values()) if own_metrics else nullcontext()
        trainer = recorded_trainer(self.module, recording_of("logger"))
        with restored, replaced_entries(replacements), trainer, acting_as_rank_zero(speaks):
            yield

    def outside(self, noted: Callable[[Any], None] = lambda _: None) -> AbstractContextManager[None]:
        """Let calls of `log` and of metrics through, and refuse them inside of blocks."""

        own = self.module.log

        def log(name: str, *args: Any, **kwargs: Any) -> None:
            self._refuse_inside("log", name)
            noted((args, kwargs))
            own(name, *untrace(args), **untrace(kwargs))

        def let_through(metric: Any, name: str, method: str) -> Callable[..., Any]:
            watched = self._watched(metric, name, method)

            def call(*args: Any, **kwargs: Any) -> Any:
                noted((args, kwargs))
                return watched(*untrace(args), **untrace(kwargs))

            return call

        self.find_metrics()
        every = [(name, metric, method) for name, metric in self.metrics.items() for method in _METHODS]
        replacements = [(vars(metric), method, let_through(metric, name, method)) for name, metric, method in every]
        return replaced_entries([(vars(self.module), "log", log), *replacements])

    def _watched(
        self,
        metric: Any,
        name: str,
        method: str,
        returned: dict[int, Computed] | None = None,
        record: Record | None = None,
    ) -> Callable[..., Any]:
        """The metric's own method, refused inside of blocks. What it returns is noted in `returned`.

        A sum or an extreme of numbers is noted in `record` as what it is, a logged value with a `reduce_fx`.
        """
        original, reduced = getattr(metric, method), _REDUCED.get(type(metric))

        def call(*args: Any, **kwargs: Any) -> Any:
            self._refuse_inside(method, name)
            value = original(*args, **kwargs)
            if record is not None and reduced and method in ("forward", "update"):
                record.add("log", name, args, {"reduce_fx": reduced})
            if returned is not None:
                returned.update(
                    {id(leaf): Computed(f"{method} {name}", path, leaf) for path, leaf in tensors_at(value)}
                )
            return value

        return call

    def replay(self, record: Record, sizes: list[int]) -> None:
        """Do on this rank what one step on the full batch, of microbatches of `sizes`, would have done."""
        self._copy_metrics()
        results: dict[str, Any] = {}
        for call in record.calls:
            if call.what == "log":
                [((value,), kwargs)] = [piece for piece in call.pieces if piece]
                self.module.log(call.name, self._value(value, results), **kwargs)
            elif call.what in ("logger", "print"):
                self._say(call)
            else:
                results[call.key] = self._on_batch(call, sizes)

    def _say(self, call: RecordedCall) -> None:
        for args, kwargs in (piece for piece in call.pieces if piece):
            if call.what == "print":
                self.module.print(*unpacked(args), **unpacked(kwargs))
            else:
                path, given = args
                do(self.module.trainer, path, unpacked(given), unpacked(kwargs))

    def _refuse_inside(self, method: str, name: str) -> None:
        if self.inside_block():
            what = f"{name!r} is logged" if method == "log" else f"{method}() of the metric {name!r} is called"
            raise UnsupportedError(
                f"{what} inside of a block. A stage of a pipeline runs its own blocks only, so other ranks would not"
                f" have it. Return the value, and log it or give it to the metric in the step; or use {NO_PIPELINE}."
            )

    def _copy_metrics(self) -> None:
        for metric in self.metrics.values():
            if id(metric) not in self.scratch:
                copy = scratch_of(metric)
                for mine, inner in zip(metric.modules(), copy.modules(), strict=True):
                    self.scratch.setdefault(id(mine), inner)

    def _on_microbatch(self, name: str, method: str, args: Any, kwargs: Any, record: Record) -> Any:
        """The result of a metric's method within the step."""
        metric = self.metrics[name]
        if method == "forward":
            return cleared(metric, self.scratch[id(metric)]).forward(*args, **kwargs)
        if method != "compute":
            return None
        root = self.metrics[self.roots[name]]
        as_far_as(root, self.scratch[id(root)])
        for call in record.calls:
            if call.what in ("forward", "update", "reset") and self.roots[call.name] == self.roots[name]:
                (piece,) = call.pieces
                assert piece is not None
                copy = self.scratch[id(self.metrics[call.name])]
                getattr(copy, "reset" if call.what == "reset" else "update")(*piece[0], **piece[1])
        return self.scratch[id(metric)].compute(*args, **kwargs)

    def _on_batch(self, call: RecordedCall, sizes: list[int]) -> Any:
        metric = self._reached(call.name)
        pieces = [(piece, size) for piece, size in zip(call.pieces, sizes, strict=False) if piece is not None]
        if call.what in ("forward", "update"):
            return on_full_batch(metric, call.what, pieces, self.scratch)()
        args, kwargs = pieces[0][0]
        return getattr(metric, call.what)(*args, **kwargs)

    def _reached(self, name: str) -> Any:
        """A metric as the step reached it: members of a collection get their own states before they change."""
        collection = self.metrics.get(name.rpartition(".")[0])
        if isinstance(collection, MetricCollection):
            collection.values()
        return self.metrics[name]

    def _named(self, value: Any, returned: dict[int, Computed]) -> Any:
        if isinstance(value, Metric | MetricCollection):
            return MetricName(self.names[id(value)])
        if isinstance(value, dict):
            return {key: self._named(item, returned) for key, item in value.items()}
        return returned[id(value)] if id(value) in returned else _detached(untrace(value))

    def _value(self, value: Any, results: dict[str, Any]) -> Any:
        if isinstance(value, MetricName):
            return self._reached(value.name)
        if isinstance(value, Computed):
            found = results[value.key]
            for key in value.path:
                found = found[key]
            return found
        return {key: self._value(item, results) for key, item in value.items()} if isinstance(value, dict) else value


def _detached(leaf: Any) -> Any:
    """A value that can be averaged and sent to other ranks: numpy's numbers and arrays become torch's."""
    if isinstance(leaf, np.generic):
        return leaf.item()
    if isinstance(leaf, np.ndarray):
        return torch.as_tensor(leaf)
    if isinstance(leaf, Tensor) and leaf.is_inference():
        with torch.inference_mode(False):  # outside of it a tensor that was made in it cannot be reduced
            return leaf.clone()
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


_REDUCED = {SumMetric: "sum", MaxMetric: "max", MinMetric: "min"}
_LOG_ARGUMENTS = (
    "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group",
    "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only",
)  # fmt: skip
