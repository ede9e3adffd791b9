"""`module.Class` and its arguments as a module of fake tensors, which have shapes and no memory."""

import ast
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from lightning_3d import register
from lightning_3d.errors import PlannerError

_INPUT = re.compile(r"(\d+(?:x\d+)*):(\w+)")


def build_module(dotted: str, arguments: Sequence[str]) -> nn.Module:
    """An instance of the class at `dotted`. Call under `FakeTensorMode`, so that weights take no memory."""
    made = _class_of(dotted)
    given = dict(_argument(text) for text in arguments)
    try:
        module = made(**given)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise PlannerError(f"{dotted}({_call(given)}) cannot be built: {said}. Arguments go in --arg.") from error
    if not isinstance(module, nn.Module):
        raise PlannerError(f"{dotted} makes a {type(module).__name__}, not a LightningModule or nn.Module.")
    configure = getattr(module, "configure_model", None)
    if callable(configure):
        configure()
    return module


def build_inputs(text: str) -> Any:
    """`"8x128:int64"` as a tensor of zeros, `"8x3x32x32:float32,8:int64"` as a tuple of them: one training batch."""
    tensors = tuple(_tensor(part.strip()) for part in text.split(","))
    return tensors[0] if len(tensors) == 1 else tensors


def _tensor(text: str) -> Tensor:
    match = _INPUT.fullmatch(text)
    dtype = getattr(torch, match[2], None) if match else None
    if match is None or not isinstance(dtype, torch.dtype):
        raise PlannerError(f"--inputs {text!r} is not SHAPE:DTYPE, as in 8x128:int64 or 8x3x32x32:float32.")
    return torch.zeros([int(size) for size in match[1].split("x")], dtype=dtype)


def _class_of(dotted: str) -> Any:
    module_name, _, name = dotted.rpartition(".")
    register()  # it may use a strategy's name
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = import_module(module_name)
    except ImportError as error:
        raise PlannerError(f"{module_name!r} of {dotted!r} cannot be imported: {error}.") from error
    if not hasattr(module, name):
        raise PlannerError(f"{module_name!r} has no {name!r}.")
    return getattr(module, name)


def _argument(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise PlannerError(f"--arg {text!r} is not NAME=VALUE.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def _call(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
