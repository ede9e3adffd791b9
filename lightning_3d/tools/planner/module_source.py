"""`module.Class` and its arguments as a module of fake tensors, which have shapes and no memory, and a call of it."""

import ast
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import isclass, isfunction
from math import prod
from typing import Any, get_type_hints
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn

from lightning_3d import register
from lightning_3d.errors import PlannerError

_INPUT = re.compile(r"(\d{1,15}(?:x\d{1,15})*):(\w+)")
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8", "bool")
_DTYPES = (*_INTEGERS, "float32", "float64", "float16", "bfloat16", "complex64", "complex128")
"""Others (quantized ones) have no plain tensors."""
MOST_ELEMENTS = 10**13
"""Of a batch: fake tensors take no memory, but their sizes must stay numbers that torch can multiply."""
FAILURES = (Exception, SystemExit)
"""Ends of a user's code. Only the keyboard ends the planner."""


def build_module(dotted: str, arguments: Sequence[str]) -> nn.Module:
    """An instance of the class at `dotted`. Call under `FakeTensorMode`, so that weights take no memory."""
    made = _named(dotted)
    _refuse_others(made, dotted)
    given = dict(_argument(text) for text in arguments)
    try:
        module = made(**given)
    except FAILURES as error:
        call = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise PlannerError(f"{dotted}({call}) cannot be built: {error_line(error)}. Arguments go in --arg.") from error
    if not isinstance(module, nn.Module):
        raise PlannerError(f"{dotted} makes a {type(module).__name__}, not a LightningModule or nn.Module.")
    configure = getattr(module, "configure_model", None)
    if callable(configure):
        try:
            configure()
        except FAILURES as error:
            raise PlannerError(f"configure_model of {dotted} fails: {error_line(error)}.") from error
    return module


def first_call(module: nn.Module, dotted: str, *, tokens: int | None, inputs: str | None) -> tuple[Any, Any]:
    """A function that runs one step of the module, and the batch of that step."""
    if inputs is not None:
        if tokens is not None:
            raise PlannerError("--inputs says how many tokens a sample has: leave out --sequence.")
        batch = build_inputs(inputs)
        return _step(module, dotted, batch), batch
    example = getattr(module, "example_input_array", None)
    if example is not None:
        if tokens is not None:
            raise PlannerError(f"{dotted} has an example_input_array: give --inputs in place of --sequence.")
        return lambda: _forward(module, example), example
    if tokens is not None:
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        return lambda: module(ids), ids
    raise PlannerError(
        f"{dotted} has no example_input_array: describe one batch of its training_step with --inputs, as in"
        " --inputs 8x128:int64 or --inputs 8x3x32x32:float32,8:int64."
    )


def build_inputs(text: str) -> Any:
    """`"8x128:int64"` as a tensor of zeros, `"8x3x32x32:float32,8:int64"` as a tuple of them: one training batch."""
    tensors = tuple(_tensor(part.strip()) for part in text.split(","))
    return tensors[0] if len(tensors) == 1 else tensors


def error_line(error: BaseException) -> str:
    """The error of a user's code, in one line."""
    if isinstance(error, SystemExit):
        return f"it calls sys.exit({error.code!r})"
    message = " ".join(str(error).split())[:300].rstrip(".")
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _tensor(text: str) -> Tensor:
    match = _INPUT.fullmatch(text)
    if match is None:
        raise PlannerError(f"--inputs {text!r} is not SHAPE:DTYPE, as in 8x128:int64 or 8x3x32x32:float32.")
    sizes, dtype = [int(size) for size in match[1].split("x")], match[2]
    if dtype not in _DTYPES:
        raise PlannerError(f"--inputs {text!r}: {dtype!r} is not one of {', '.join(_DTYPES)}.")
    if 0 in sizes:
        raise PlannerError(f"--inputs {text!r} is an empty batch: every size must be at least 1.")
    if prod(sizes) > MOST_ELEMENTS:
        raise PlannerError(f"--inputs {text!r} has {prod(sizes):.1e} elements: give at most {MOST_ELEMENTS:.0e}.")
    return torch.zeros(sizes, dtype=getattr(torch, dtype))


def _named(dotted: str) -> Any:
    module_name, _, name = dotted.rpartition(".")
    register()  # it may use a strategy's name
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = _imported(module_name)
        if hasattr(module, name):  # a package may import its parts here, and they may fail
            return getattr(module, name)
    except FAILURES as error:
        raise PlannerError(f"{module_name!r} of {dotted!r} cannot be imported: {error_line(error)}.") from error
    raise PlannerError(f"{module_name!r} has no {name!r}.")


class FitReached(BaseException):
    """Ends a script at its `fit`. A BaseException: `except Exception` in the script does not catch it."""


def _imported(name: str) -> Any:
    """The file of that name, run until a `Trainer.fit` outside of functions: a question trains nothing."""

    def end(*_: Any, **__: Any) -> None:
        raise FitReached(sys.modules[name])

    with patch.object(Trainer, "fit", end):
        try:
            return import_module(name)
        except FitReached as reached:
            return sys.modules.setdefault(name, reached.args[0])


def _refuse_others(made: Any, dotted: str) -> None:
    """Only what says that it makes a module is called: a call of anything else may do anything."""
    kind = made
    if isfunction(made):
        try:
            kind = get_type_hints(made).get("return")
        except FAILURES as error:
            raise PlannerError(f"what {dotted} returns cannot be looked up: {error_line(error)}.") from error
    if not isclass(kind) or not issubclass(kind, nn.Module):
        raise PlannerError(
            f"{dotted} is not a LightningModule or nn.Module, nor a function that says it returns one"
            " (`-> nn.Module`). It is not called."
        )


def _argument(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise PlannerError(f"--arg {text!r} is not NAME=VALUE.")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return name, value


def _step(module: nn.Module, dotted: str, batch: Any) -> Callable[[], Any]:
    """The `training_step` on `batch`, or the forward of what is no LightningModule."""
    if not isinstance(module, LightningModule):
        return lambda: _forward(module, batch)
    if not is_overridden("training_step", module):
        raise PlannerError(f"{dotted} has no training_step, which --inputs is a batch of.")
    index = (0,) if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2) else ()
    return lambda: module.training_step(batch, *index)


def _forward(module: nn.Module, batch: Any) -> Any:
    """As Lightning gives an `example_input_array` to a module."""
    if isinstance(batch, dict):
        return module(**batch)
    return module(*batch) if isinstance(batch, tuple) else module(batch)
