"""Bytes that a rank holds follow the ZeRO table."""

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from lightning_3d import Strategy3D
from lightning_3d.comm.replicate import local
from tests.parity import QUIET
from tests.workers import run
from tests.zoo.language import UntiedGPT


def _bytes(tensors):
    """Of the memory behind `tensors`, each storage once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in map(local, tensors)}
    return sum(storages.values())


class Weighed(UntiedGPT):
    """Weighs itself at rest, in the middle of a forward, and before and after the optimizer's step."""

    def __init__(self):
        super().__init__()
        self.weights = {}

    def on_train_batch_start(self, batch, batch_idx):
        self.weights["rest"] = _bytes(self.parameters())

    def forward(self, tokens):
        logits = super().forward(tokens)
        self.weights["forward"] = _bytes(p for p in self.parameters() if p.untyped_storage().nbytes())
        return logits

    def on_before_optimizer_step(self, optimizer):
        self.weights["gradients"] = _bytes(p.grad for p in self.parameters() if p.grad is not None)

    def on_train_batch_end(self, *arguments):
        super().on_train_batch_end(*arguments)
        (optimizer,) = self.trainer.optimizers
        for name in ("states", "loaded"):
            self.weights[name] = _bytes(t for s in optimizer.state.values() for k, t in s.items() if k != "step")
            optimizer.load_state_dict(optimizer.state_dict())


def _weigh(stage):
    seed_everything(0, verbose=False)
    module = Weighed()
    total = _bytes(module.parameters())
    strategy = Strategy3D(zero_stage=stage)
    Trainer(**{**QUIET, "devices": 2, "strategy": strategy, "max_epochs": 1, "limit_val_batches": 0}).fit(module)
    return {name: weight / total for name, weight in module.weights.items()}


TABLE = {
    0: {"rest": 1.0, "forward": 1.0, "gradients": 1.0, "states": 2.0, "loaded": 2.0},
    1: {"rest": 0.5, "gradients": 0.5, "states": 1.0, "loaded": 1.0},
    2: {"rest": 0.5, "gradients": 0.5, "states": 1.0, "loaded": 1.0},
    3: {"rest": 0.5, "gradients": 0.5, "states": 1.0, "loaded": 1.0},
}
"""In units of the parameters, on two ranks. The paper's stage 1 keeps whole parameters and gradients."""


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_parameters_gradients_and_states(stage):
    for weights in run(_weigh, stage, world=2):
        for name, wanted in TABLE[stage].items():
            assert weights[name] == pytest.approx(wanted, rel=0.05), (name, weights)


def test_stage_3_never_holds_all_parameters_at_once():
    """After the forward of the last block only the root's parameters and the shards are there."""
    whole, sharded = (run(_weigh, stage, world=2)[0]["forward"] for stage in (2, 3))
    assert whole > 0.95
    assert sharded < 0.75
    assert torch.is_grad_enabled()
