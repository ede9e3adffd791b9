"""Train a module of `tests/modules.py` under a layout and on one device, and compare."""

import warnings

import torch
from lightning.pytorch import Trainer, seed_everything

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


def train(name, world, strategy, attributes, trainer):
    """Fit on this rank; what came out: losses per step, final weights on this rank."""
    warnings.simplefilter("ignore")
    seed_everything(7, verbose=False)
    module = MODULES[name]()
    for key, value in attributes.items():
        setattr(module, key, value)
    chosen = Strategy3D(**strategy) if strategy is not None else "auto"
    fit = Trainer(**{**QUIET, "devices": world, "strategy": chosen, "max_epochs": 4, "limit_val_batches": 0, **trainer})
    fit.fit(module)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return {"losses": module.seen, "weights": state, "metrics": {k: float(v) for k, v in fit.callback_metrics.items()}}


_references: dict[str, dict] = {}


def reference(name, attributes, trainer):
    """The same training on one device, once per test session."""
    key = repr((name, sorted(attributes.items()), sorted(trainer.items())))
    if key not in _references:
        (_references[key],) = run(train, name, 1, None, attributes, trainer, world=1)
    return _references[key]


def assert_parity(name, world, strategy, *, tolerance=1e-5, attributes=None, trainer=None, timeout=120):
    """Losses of every step and final weights equal one device's, on every rank."""
    attributes, trainer = attributes or {}, trainer or {}
    wanted = reference(name, attributes, trainer)
    results = run(train, name, world, strategy, attributes, trainer, world=world, timeout=timeout)
    assert len(wanted["losses"]) >= 5
    for rank, got in enumerate(results):
        torch.testing.assert_close(
            got["losses"], wanted["losses"], rtol=tolerance, atol=tolerance, msg=_say(rank, "loss")
        )
        assert got["weights"].keys() == wanted["weights"].keys()
        for key, weight in wanted["weights"].items():
            torch.testing.assert_close(got["weights"][key], weight, rtol=tolerance, atol=tolerance, msg=_say(rank, key))
    return results


def _say(rank, what):
    return lambda message: f"rank {rank}, {what}: {message}"
