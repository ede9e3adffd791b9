"""Tensor, pipeline and ZeRO parallelism for an unchanged LightningModule.

Importing this package registers the names `3d`, `3d_zero0` ... `3d_zero3`, `3d_zero3_offload` with Lightning. Only the
command line puts that off until a command needs it, since Lightning and torch take seconds to import.
"""

import sys as _sys
import typing as _typing
from importlib import import_module as _import_module
from pathlib import Path as _Path

if _typing.TYPE_CHECKING:
    from lightning_3d.layout import Layout as Layout
    from lightning_3d.module.anatomy import Anatomy as Anatomy
    from lightning_3d.monitor.callback import Monitor3D as Monitor3D
    from lightning_3d.precision import Precision3D as Precision3D
    from lightning_3d.strategy.strategy import Strategy3D as Strategy3D

__version__ = "0.1.0"
__all__ = ["Anatomy", "Layout", "Monitor3D", "Precision3D", "Strategy3D", "serve_pytorch_lightning"]

_HOMES = {
    "Anatomy": "module.anatomy",
    "Layout": "layout",
    "Monitor3D": "monitor.callback",
    "Precision3D": "precision",
    "Strategy3D": "strategy.strategy",
}


def register() -> None:
    """Import everything public and register the strategy names; nothing happens the second time."""
    if "Strategy3D" in globals():
        return
    from lightning.pytorch.strategies import StrategyRegistry

    for name, home in _HOMES.items():
        globals()[name] = getattr(_import_module(f"lightning_3d.{home}"), name)
    globals()["Strategy3D"].register_strategies(StrategyRegistry)
    _import_module("lightning_3d.launch.served_names").serve_where_asked()
    _import_module("lightning_3d.strategy.registry").refuse_other_package()


def serve_pytorch_lightning() -> None:
    """Let `pytorch_lightning` and `lightning_fabric` mean `lightning.pytorch` and `lightning.fabric`.

    Call it before a package is imported that uses them. Processes that start later inherit it.
    """
    _import_module("lightning_3d.launch.served_names").serve()


def __getattr__(name: str) -> _typing.Any:
    if name in _HOMES:
        register()
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _is_command_line() -> bool:
    """Return True if this process is `lightning-3d ...` or `python -m lightning_3d ...`."""
    script = _Path(_sys.argv[0]).name if _sys.argv else ""
    return script.removesuffix(".exe") == "lightning-3d" or _sys.orig_argv[1:3] == ["-m", "lightning_3d"]


if not _is_command_line():
    register()
