"""Stand-ins for the Trainer's loggers. They record the calls of a step; every rank then carries them out.

Real loggers exist on rank 0 only. `trainer.should_stop = True` is recorded too: all ranks have to stop together.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
    trainer = getattr(module, "_trainer", None)  # the property raises where a module has none, as in a test
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
    """Carry out a recorded call."""
    if path == _STOP:
        trainer.should_stop = True
        return
    target: Any = trainer.loggers
    for kind, name in path:
        target = getattr(target, name) if kind == "attribute" else target[name]
    target(*args, **kwargs)
