"""Fit a module with a Trainer, over a pipeline or on one device: what a user would see of it."""

import math
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.utils.data import DataLoader

from lightning_3d import Strategy3D
from tests.parity import QUIET
from tests.workers import run


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
    chosen = Strategy3D(quiet=True, **strategy) if strategy is not None else "auto"
    ranks = math.prod((strategy or {}).get(f"{axis}_parallel_size", 1) for axis in ("pipeline", "tensor"))
    watch = Watch()
    limits = {"limit_val_batches": 2, "val_check_interval": 3} if validate else {"limit_val_batches": 0}
    made = Trainer(
        **{**QUIET, "max_epochs": 1, "devices": ranks, "strategy": chosen, "callbacks": [watch], **limits, **flags}
    )
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
    warnings.simplefilter("ignore")
    return fit(build, strategy, **options)


def _say(what: str) -> Any:
    return lambda text: f"{what}: {text}"
