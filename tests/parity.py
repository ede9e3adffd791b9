"""Train a module under a layout and on one device with a Trainer, and compare.

`assert_parity` is for modules with batches of their own, and compares gradients too. `check` is for modules whose batches
a test passes, and compares what each step and each validation logged.
"""

import importlib
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.utils.data import DataLoader

from lightning_3d import Strategy3D
from tests.workers import WorkerError, run
from tests.zoo import MODULES

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,  # the modules cut their batches themselves
}


GATHERED = 2
"""Steps whose gradients are gathered, which takes longer than the steps. What is wrong in a later one shows in its norm,
the losses after it and the weights."""


class Gradients(Callback):
    """Before each optimizer step, the norm of the gradients, as a user would ask for it; of the first few also each
    gradient, whole."""

    def __init__(self):
        self.norms, self.whole = [], []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        here = {name: p for name, p in module.named_parameters() if not p.is_meta and p.requires_grad}
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in here.items()}
        if isinstance(trainer.strategy, Strategy3D):
            norm = trainer.strategy.grad_norm(2.0)
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        self.norms.append(float(norm))
        if len(self.whole) == GATHERED:
            return
        if isinstance(trainer.strategy, Strategy3D):
            parallel = trainer.strategy._parallel
            grads = {name: parallel.parameters.full(p, grads[name]) for name, p in here.items()}
        self.whole.append({name: grad.detach().cpu().clone() for name, grad in grads.items()})


def layouts(*names: str) -> dict[str, tuple[int, dict[str, int]]]:
    """Ranks and arguments by name: `tensor-zero2` has two tensor ranks and two data ranks."""
    found = {}
    for name in names:
        axes = name.split("-")
        sizes = [("zero_stage", int(axis[4:])) if "zero" in axis else (f"{axis}_parallel_size", 2) for axis in axes]
        found[name] = 2 ** len(axes), dict(sizes)
    return found


@contextmanager
def silent() -> Iterator[None]:
    """Ignore warnings of the code inside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def caught_warnings() -> Iterator[list[str]]:
    """The texts of all warnings of the code inside, once it has ended."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            yield texts
        finally:
            texts += [str(each.message) for each in caught]


def raised(kind: type[Exception], function: Any, *args: Any) -> str:
    """The message of the error of `kind` that `function(*args)` raises."""
    with pytest.raises(kind) as caught:
        function(*args)
    return str(caught.value)


@contextmanager
def refused_by_both(match: str) -> Iterator[Any]:
    """Each of two ranks raises in these words."""
    with pytest.raises(WorkerError, match=match) as error:
        yield error
    assert str(error.value).count("--- rank") == 2


def long(*values: Any, **name: str) -> Any:
    """A case that only the long run has, with its `id` where that is no value."""
    return pytest.param(*values, marks=pytest.mark.long, **name)


def in_turn(cases: Any, every: int, first: int = 0) -> list[Any]:
    """Leave each `every`-th of `cases`, from `first` on, in the short run. The others are `long`."""
    return [case if at % every == first else _long(case) for at, case in enumerate(cases)]


def _long(case: Any) -> Any:
    if hasattr(case, "marks"):
        return pytest.param(*case.values, id=case.id, marks=(*case.marks, pytest.mark.long))
    return long(*(case if isinstance(case, tuple) else (case,)))


def largest(numbers):
    """The largest of `numbers`. `max` may pass over one that is not a number; here it is infinite."""
    return max((math.inf if math.isnan(number) else number for number in numbers), default=0.0)


def build(name):
    """A module by its name in `tests.zoo.MODULES`, as "some.test.module:Class", or by calling `name`."""
    if callable(name):
        return name()
    if ":" in name:
        where, name = name.split(":")
        return getattr(importlib.import_module(where), name)()
    return MODULES[name]()


def make_strategy(arguments):
    """`Strategy3D` or its subclass `kind` with the other `arguments`."""
    return arguments.get("kind", Strategy3D)(**{key: value for key, value in arguments.items() if key != "kind"})


def make_trainer(world: int, strategy: dict[str, Any] | None, *, quiet: bool | None = None, **flags: Any) -> Trainer:
    """A Trainer on `world` devices, with `QUIET` where `flags` say nothing else. `strategy` has arguments of `kind`, of
    which `quiet` is one more; None is one device."""
    said = {} if quiet is None else {"quiet": quiet}
    chosen = "auto" if strategy is None else make_strategy({**said, **strategy})
    return Trainer(**{**QUIET, "devices": world, "strategy": chosen, **flags})


def train(name, world, strategy, attributes, trainer):
    """Fit on this rank; what came out: losses, gradients and their norms per step, final weights on this rank.

    `attributes` are set on the module. The "callbacks" of `trainer` are functions that make them.
    """
    warnings.simplefilter("ignore")
    seed_everything(7, verbose=False)
    module = build(name)
    for key, value in attributes.items():
        setattr(module, key, value)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    gradients = Gradients()
    epochs = 2 if trainer.get("accumulate_grad_batches", 1) > 1 else 1  # the first may end within a window
    flags = {"max_epochs": epochs, "limit_val_batches": 0, **trainer}
    flags["callbacks"] = [gradients, *(make() for make in trainer.get("callbacks", []))]
    fit = make_trainer(world, strategy, **flags)
    fit.fit(module)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return {
        "losses": module.seen,
        "norms": gradients.norms,
        "gradients": gradients.whole,
        "before": before,
        "weights": state,
        "metrics": {k: float(v) for k, v in fit.callback_metrics.items()},
    }


_references: dict[str, dict] = {}


def reference(name, attributes, trainer):
    """The same training on one device, once per test session."""
    key = repr((name, sorted(attributes.items()), sorted(trainer.items())))
    if key not in _references:
        (_references[key],) = run(train, name, 1, None, attributes, trainer, world=1)
    return _references[key]


def assert_parity(name, world, strategy, *, tolerance=1e-5, attributes=None, trainer=None, timeout=120, steps=5):
    """Losses and norms of every step, gradients of the first ones, metrics and final weights equal one device's, on
    every rank."""
    attributes, trainer = attributes or {}, trainer or {}
    wanted = reference(name, attributes, trainer)
    results = run(train, name, world, strategy, attributes, trainer, world=world, timeout=timeout)
    assert len(wanted["losses"]) >= steps
    assert_same(results, wanted, tolerance)
    return results


def assert_same(results, wanted, tolerance):
    """What `train` returned on every rank is what it returned on one device."""
    close = {"rtol": tolerance, "atol": tolerance}
    for rank, got in enumerate(results):
        for what in ("losses", "norms", "metrics"):
            torch.testing.assert_close(got[what], wanted[what], **close, msg=_say(f"rank {rank}, {what}"))
        for step, (mine, whole) in enumerate(zip(got["gradients"], wanted["gradients"], strict=True)):
            for key, grad in mine.items():
                torch.testing.assert_close(grad, whole[key], **close, msg=_say(f"rank {rank}, step {step}, {key}.grad"))
        assert got["weights"].keys() == wanted["weights"].keys()
        for key, weight in wanted["weights"].items():
            torch.testing.assert_close(got["weights"][key], weight, **close, msg=_say(f"rank {rank}, {key}"))
    for step, whole in enumerate(wanted["gradients"]):
        assert {key for got in results for key in got["gradients"][step]} == whole.keys()


def change_differs(got, wanted):
    """By how much what training changed differs, relative to it (Frobenius), over all weights."""
    squares = [
        ((got["weights"][key] - weight).square().sum(), (weight - wanted["before"][key]).square().sum())
        for key, weight in wanted["weights"].items()
    ]
    return float((sum(d for d, _ in squares) / sum(n for _, n in squares)).sqrt())


class Watch(Callback):
    """What every step and every validation gave."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.validated: list[float] = []
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        if outputs is not None:
            self.validated.append(float(outputs["loss"] if isinstance(outputs, dict) else outputs))


def fit(build: Any, strategy: dict[str, Any] | None = None, validate: bool = False, **flags: Any) -> dict[str, Any]:
    """Fit what `build()` gives (a module and its batches); losses, logs, and the weights at the end on this rank."""
    seed_everything(7, verbose=False)
    module, batches = build()
    axes = ("pipeline", "data", "context", "tensor")
    ranks = math.prod((strategy or {}).get(f"{axis}_parallel_size", 1) for axis in axes)
    watch = Watch()
    limits = {"limit_val_batches": 2, "val_check_interval": 3} if validate else {"limit_val_batches": 0}
    flags = {"max_epochs": 1, "callbacks": [watch], **limits, **flags}
    made = make_trainer(ranks, strategy, quiet=True, **flags)
    loader = DataLoader(batches, batch_size=None)
    made.fit(module, loader, loader if validate else None)
    return {
        "losses": watch.losses,
        "validated": watch.validated,
        "logged": [*watch.logged, {name: float(value) for name, value in made.callback_metrics.items()}],
        "weights": {name: value.detach().clone() for name, value in module.state_dict().items()},
    }


def assert_same_fit(got: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Losses, logs, validations and weights of two fits agree."""
    for what in ("losses", "validated", "logged"):
        assert len(got[what]) == len(wanted[what]), what
        torch.testing.assert_close(got[what], wanted[what], rtol=tolerance, atol=tolerance, msg=_say(what))
    assert got["weights"].keys() == wanted["weights"].keys()
    for name, value in wanted["weights"].items():
        torch.testing.assert_close(got["weights"][name], value, rtol=0, atol=tolerance, msg=_say(name))


def check(build: Any, world: int, strategy: dict[str, Any], timeout: float = 90.0, **options: Any) -> dict[str, Any]:
    """A pipeline of `world` ranks trains as one device does, on every rank."""
    (wanted,) = run(fit_with, build, None, options, world=1, timeout=timeout)
    strategy = {"pipeline_parallel_size": world, **strategy}
    for got in run(fit_with, build, strategy, options, world=world, timeout=timeout):
        assert_same_fit(got, wanted)
    return wanted


def fit_with(build: Any, strategy: dict[str, Any] | None, options: dict[str, Any]) -> dict[str, Any]:
    return fit(build, strategy, **options)


def _say(what: str) -> Any:
    return lambda message: f"{what}: {message}"
