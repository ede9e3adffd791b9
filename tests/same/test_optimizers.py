"""Optimizers of torch.optim, fused and foreach, over mixed plain and split parameters; parameters frozen for a while."""

import pytest
import torch
from torch import optim

from tests.modules import MLP, UntiedGPT
from tests.parity import assert_parity

LAYOUTS = {
    "tensor": (2, {"tensor_parallel_size": 2}),
    "zero3": (2, {"zero_stage": 3}),
    "pipeline-zero1": (4, {"pipeline_parallel_size": 2, "zero_stage": 1}),
}
KINDS = {
    "fused": lambda parameters: optim.AdamW(parameters, lr=1e-3, eps=1e-4, fused=True),
    "foreach": lambda parameters: optim.AdamW(parameters, lr=1e-3, eps=1e-4, foreach=True),
    "adagrad": lambda parameters: optim.Adagrad(parameters, lr=1e-2, eps=1e-2),
    "rmsprop": lambda parameters: optim.RMSprop(parameters, lr=1e-4, eps=1e-3),
    "adamax": lambda parameters: optim.Adamax(parameters, lr=1e-3, eps=1e-4),
}


class Chosen(UntiedGPT):
    def configure_optimizers(self):
        return KINDS[self.optimizer](self.parameters())


class Plateau(MLP):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class Thawing(UntiedGPT):
    """The first block is frozen in the first epoch."""

    def on_train_epoch_start(self):
        self.blocks[0].requires_grad_(self.current_epoch > 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_optimizer(kind, layout):
    world, strategy = LAYOUTS[layout]
    trainer = {"max_epochs": 1}
    assert_parity(f"{__name__}:Chosen", world, strategy, attributes={"optimizer": kind}, trainer=trainer)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plateau_schedule(layout):
    world, strategy = LAYOUTS[layout]
    assert_parity(f"{__name__}:Plateau", world, strategy, trainer={"max_epochs": 3, "limit_val_batches": 2})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_frozen_then_trained(layout):
    world, strategy = LAYOUTS[layout]
    assert_parity(f"{__name__}:Thawing", world, strategy, trainer={"max_epochs": 2})
