"""Trainings that stop, are saved and go on elsewhere; run by the workers of `tests/workers.py`."""

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from tests import parity
from tests.parity import QUIET, make_strategy
from tests.workers import run
from tests.zoo.language import GPT, Block, Llama
from tests.zoo.plain import MLP


def _two_groups(module, kind):
    weights = [p for p in module.parameters() if p.dim() > 1]
    rest = [p for p in module.parameters() if p.dim() <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0, "lr": 0.002}]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1e-3, eps=1e-4)


class TwoGroups:
    def configure_optimizers(self):
        optimizer = _two_groups(self, self.optimizer)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)}


class GroupedGPT(TwoGroups, GPT):
    pass


class DeepGPT(GroupedGPT):
    """With a block for each of four stages, and more."""

    def __init__(self):
        super().__init__()
        self.blocks.extend(Block(16, 4) for _ in range(3))


class GroupedMLP(TwoGroups, MLP):
    pass


class NoisyGPT(GroupedGPT):
    def loss(self, batch):
        return super().loss(batch) * (1 + 0.1 * torch.rand(())) + 0.01 * float(torch.rand(()))


MODULES = {"DeepGPT": DeepGPT, "NoisyGPT": NoisyGPT, "GPT": GroupedGPT, "MLP": GroupedMLP, "Llama": Llama}


class SaveAt(Callback):
    """Save when `global_step` is `step`, then stop if asked."""

    def __init__(self, step, path, stop):
        self.step, self.path, self.stop = step, path, stop

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = trainer.should_stop or self.stop


def build(name, optimizer="adamw"):
    seed_everything(7, verbose=False)
    module = MODULES[name]() if name in MODULES else parity.build(name)
    module.optimizer = optimizer
    return module


def train(name, world, strategy, steps, resume=None, save=None, optimizer="adamw", trainer=None):
    """Train to `steps`, saving at the end under `save`; returns losses and what `fit` left."""
    module = build(name, optimizer)
    chosen = make_strategy(strategy) if strategy is not None else "auto"
    callbacks = [SaveAt(steps, save, True)] if save else []
    flags = {**QUIET, "limit_val_batches": 0, "max_steps": steps, "max_epochs": -1, **(trainer or {})}
    fit = Trainer(**flags, devices=world, strategy=chosen, callbacks=callbacks)
    fit.fit(module, ckpt_path=resume)
    weights = {key: value.clone() for key, value in module.state_dict().items()}
    states = [optimizer.state_dict() for optimizer in fit.optimizers]
    return {"losses": module.seen, "weights": weights, "optimizers": states, "step": fit.global_step}


def assert_goes_on(path, name, saved, world, other):
    """A run of another layout goes on from a checkpoint of four ranks, to the numbers of one device."""
    (whole,) = run(train, name, 1, None, 5, world=1)
    run(train, name, 4, saved, 3, None, str(path), world=4)
    for result in run(train, name, world, other, 5, str(path), world=world):
        assert result["losses"][-2:] == pytest.approx(whole["losses"][-2:], rel=1e-5)
        for key, weight in whole["weights"].items():
            torch.testing.assert_close(result["weights"][key], weight, rtol=1e-5, atol=1e-5)


def resave(name, world, strategy, resume, save, optimizer="adamw"):
    """Load a checkpoint and save it again, without a step."""

    class Resave(Callback):
        def on_train_start(self, trainer, *_):
            trainer.save_checkpoint(save)
            trainer.should_stop = True

    module = build(name, optimizer)
    chosen = make_strategy(strategy) if strategy is not None else "auto"
    flags = {**QUIET, "limit_val_batches": 0, "limit_train_batches": 1, "max_epochs": -1}
    Trainer(**flags, devices=world, strategy=chosen, callbacks=[Resave()]).fit(module, ckpt_path=resume)
