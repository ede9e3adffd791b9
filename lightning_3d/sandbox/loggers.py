"""What a pipelined step asks of loggers, recorded where it runs, and done on every rank: they are real on rank 0 only.

So is `trainer.should_stop = True`: ranks that do not hear of it would go on, and wait for those that stopped.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Tell = Callable[[str, tuple[Any, ...], dict[str, Any]], None]
"""Takes a call: what is called as text, then (the steps that lead to it, its arguments) and its keyword arguments."""
Route = tuple[tuple[str, Any], ...]
"""Attributes and items that lead from the list of loggers to what is called."""
_STOP: Route = (("stop", None),)


class RecordedLoggers:
    """Stands for something reached through a logger; a call of it is told, and returns None as on ranks without it."""

    _tell: Tell
    _path: Route

    def __init__(self, tell: Tell, path: Route) -> None:
        self.__dict__.update(_tell=tell, _path=path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._then("attribute", name)

    def __getitem__(self, key: Any) -> Any:
        return self._then("item", key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._then("attribute", "__setitem__")(key, value)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._tell(".".join(str(name) for _, name in self._path), (self._path, args), kwargs)

    def _then(self, kind: str, name: Any) -> "RecordedLoggers":
        return RecordedLoggers(self._tell, (*self._path, (kind, name)))


class LoggerStandIn:
    """A logger whose methods are told; its plain attributes (`name`, `version`, `log_dir`) are its own."""

    def __init__(self, logger: Any, tell: Tell, index: int) -> None:
        self.__dict__.update(_logger=logger, _told=RecordedLoggers(tell, (("item", index),)))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._logger)  # steps ask isinstance(self.logger, TensorBoardLogger)

    def __getattr__(self, name: str) -> Any:
        if name == "experiment":  # asking for the real one may begin it
            return self._told.experiment
        value = getattr(self._logger, name)
        return getattr(self._told, name) if callable(value) else value


@contextmanager
def recorded_trainer(module: Any, tell: Tell) -> Iterator[None]:
    """The Trainer's loggers are stand-ins, and that it should stop is told."""
    trainer = getattr(module, "_trainer", None)  # the property raises where a module has none, as in a test
    if trainer is None:
        yield
        return
    real, stops = trainer.loggers, trainer.should_stop
    trainer.loggers = [LoggerStandIn(logger, tell, index) for index, logger in enumerate(real)]
    try:
        yield
        if trainer.should_stop and not stops:
            tell("should_stop", (_STOP, ()), {})
    finally:
        trainer.loggers, trainer.should_stop = real, stops


def do(trainer: Any, path: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Do what was told."""
    if path == _STOP:
        trainer.should_stop = True
        return
    target: Any = trainer.loggers
    for kind, name in path:
        target = getattr(target, name) if kind == "attribute" else target[name]
    target(*args, **kwargs)
