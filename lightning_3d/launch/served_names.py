"""Lets `pytorch_lightning` and `lightning_fabric` mean `lightning.pytorch` and `lightning.fabric`.

The separate packages have the same code, but other classes. A package that imports them builds their Trainer, which
refuses our strategy. Served, both names are one module object, also for each submodule and for a class in a pickle.

The variable carries this to processes that start later. The installed file `served_names.pth` reads it at the start of
Python, so that the order of imports in a script does not matter there.
"""

import os
import sys
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.metadata import distributions
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import lightning
from lightning.pytorch.utilities import rank_zero_warn

from lightning_3d.errors import ConfigurationError

SERVED = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
VARIABLE = "LIGHTNING_3D_SERVE_PYTORCH_LIGHTNING"
REMEDY = (
    "Call lightning_3d.serve_pytorch_lightning() at the top of the script, before anything imports"
    " `pytorch_lightning`, or start it with `python -m lightning_3d run`: that name means `lightning.pytorch` then."
)


class ServedNames(Loader):
    """Finds the served names, and loads the module of the other name."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        known = find_spec(_other(name)) if name.partition(".")[0] in SERVED else None
        return known and ModuleSpec(name, self, is_package=known.submodule_search_locations is not None)

    def exec_module(self, module: ModuleType) -> None:
        sys.modules[module.__name__] = import_module(_other(module.__name__))  # an import gives what is there then


def _other(name: str) -> str:
    package, dot, rest = name.partition(".")
    return SERVED[package] + dot + rest


finder = ServedNames()


def serve() -> None:
    """Serve the names in this process and in those that it starts. Nothing happens the second time."""
    if finder in sys.meta_path:
        return
    for name, other in SERVED.items():
        if name in sys.modules and sys.modules[name] is not sys.modules.get(other):
            raise ConfigurationError(
                f"`{name}` is imported already, so it cannot mean `{other}` any more: classes that were taken from it"
                f" are others than those of `{other}`, and a Trainer refuses them. {REMEDY}"
            )
    for name in SERVED:
        _compare_versions(name.replace("_", "-"))
    sys.meta_path.insert(0, finder)
    os.environ[VARIABLE] = "1"


def serve_where_asked() -> None:
    """Serve the names where the environment says so."""
    if os.environ.get(VARIABLE, "") not in ("", "0"):
        serve()


def _compare_versions(package: str) -> None:
    """Warn of another minor version, whose hooks and checkpoints are those of the major one; refuse another major."""
    for installed in distributions(name=package):
        theirs, ours = installed.version.split("."), lightning.__version__.split(".")
        text = (
            f"{package} {installed.version} is installed, and its name is to mean lightning {lightning.__version__}."
            f" Code that was written for it may train otherwise. Install {package}=={'.'.join(ours[:2])}.*"
        )
        if theirs[0] != ours[0]:
            raise ConfigurationError(f"{text}, and packages that work with it.")
        if theirs[1] != ours[1]:
            rank_zero_warn(f"{text} to be sure.")
