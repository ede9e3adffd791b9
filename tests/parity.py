"""Train a module of `tests/zoo` under a layout and on one device, and compare."""

import importlib
import math
import warnings

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_3d import Strategy3D
from tests.workers import run
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


GATHERED = 5
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
            grads = {name: parallel.gather_full(p, grads[name]) for name, p in here.items()}
        self.whole.append({name: grad.detach().cpu().clone() for name, grad in grads.items()})


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


def train(name, world, strategy, attributes, trainer):
    """Fit on this rank; what came out: losses, gradients and their norms per step, final weights on this rank.

    Args:
        name: of a module, see `build`.
        world: number of devices.
        strategy: arguments of `Strategy3D`, None for one device.
        attributes: to set on the module.
        trainer: arguments of the Trainer; "callbacks" are functions that make them.
    """
    warnings.simplefilter("ignore")
    seed_everything(7, verbose=False)
    module = build(name)
    for key, value in attributes.items():
        setattr(module, key, value)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    chosen = Strategy3D(**strategy) if strategy is not None else "auto"
    gradients = Gradients()
    flags = {"devices": world, "strategy": chosen, "max_epochs": 2, "limit_val_batches": 0}
    callbacks = [gradients, *(make() for make in trainer.get("callbacks", []))]
    fit = Trainer(**{**QUIET, **flags, **trainer, "callbacks": callbacks})
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
            torch.testing.assert_close(got[what], wanted[what], **close, msg=_say(rank, what))
        for step, (mine, whole) in enumerate(zip(got["gradients"], wanted["gradients"], strict=True)):
            for key, grad in mine.items():
                torch.testing.assert_close(grad, whole[key], **close, msg=_say(rank, f"step {step}, {key}.grad"))
        assert got["weights"].keys() == wanted["weights"].keys()
        for key, weight in wanted["weights"].items():
            torch.testing.assert_close(got["weights"][key], weight, **close, msg=_say(rank, key))
    for step, whole in enumerate(wanted["gradients"]):
        assert {key for got in results for key in got["gradients"][step]} == whole.keys()


def _say(rank, what):
    return lambda message: f"rank {rank}, {what}: {message}"
