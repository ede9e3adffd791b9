"""Train a module of `tests/modules.py` under a layout and on one device, and compare."""

import importlib
import warnings

import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from lightning_3d import Strategy3D
from tests.modules import MODULES
from tests.workers import run

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,  # the modules cut their batches themselves
}


class Norms(Callback):
    """The norm of the gradients before each optimizer step, as a user would ask for it."""

    def __init__(self):
        self.seen = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if isinstance(trainer.strategy, Strategy3D):
            norm = trainer.strategy.grad_norm(2.0)
        else:
            norm = torch.nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None])
        self.seen.append(float(norm))


def build(name):
    """A module by its name in `tests/modules.py`, or as "some.test.module:Class"."""
    if ":" in name:
        where, name = name.split(":")
        return getattr(importlib.import_module(where), name)()
    return MODULES[name]()


def train(name, world, strategy, attributes, trainer):
    """Fit on this rank; what came out: losses and gradient norms per step, final weights on this rank."""
    warnings.simplefilter("ignore")
    seed_everything(7, verbose=False)
    module = build(name)
    for key, value in attributes.items():
        setattr(module, key, value)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    chosen = Strategy3D(**strategy) if strategy is not None else "auto"
    norms = Norms()
    flags = {"devices": world, "strategy": chosen, "max_epochs": 4, "limit_val_batches": 0, "callbacks": [norms]}
    fit = Trainer(**{**QUIET, **flags, **trainer})
    fit.fit(module)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return {
        "losses": module.seen,
        "norms": norms.seen,
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
    """Losses and gradient norms of every step, metrics and final weights equal one device's, on every rank."""
    attributes, trainer = attributes or {}, trainer or {}
    wanted = reference(name, attributes, trainer)
    results = run(train, name, world, strategy, attributes, trainer, world=world, timeout=timeout)
    assert len(wanted["losses"]) >= steps
    close = {"rtol": tolerance, "atol": tolerance}
    for rank, got in enumerate(results):
        for what in ("losses", "norms", "metrics"):
            torch.testing.assert_close(got[what], wanted[what], **close, msg=_say(rank, what))
        assert got["weights"].keys() == wanted["weights"].keys()
        for key, weight in wanted["weights"].items():
            torch.testing.assert_close(got["weights"][key], weight, **close, msg=_say(rank, key))
    return results


def _say(rank, what):
    return lambda message: f"rank {rank}, {what}: {message}"
