"""Experts over data ranks in a whole run: evaluation, mixed precision, averages of weights, modules built in parts."""

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import WeightAveraging
from torch.optim.swa_utils import get_ema_avg_fn

from tests import parity
from tests.experts.test_data_ranks import TWO, assert_same
from tests.parity import build, long, make_trainer
from tests.workers import run


def averages():
    return WeightAveraging(avg_fn=get_ema_avg_fn(0.8))


@pytest.mark.parametrize("kind", ["Qwen3", "Listed"])
def test_averages_of_weights_are_those_of_one_device(kind):
    assert_same(kind, 2, {"callbacks": [averages], "gradient_clip_val": None}, **TWO, zero_stage=1)


def test_evaluation_between_epochs():
    assert_same("Qwen3", 2, {"limit_val_batches": 2}, **TWO, zero_stage=2)


def test_the_routers_loss_is_the_mean_of_data_ranks():
    name, trainer = "tests.tensor.trained:RouterLoss", {"max_epochs": 2}
    (wanted, _) = run(parity.train, name, 2, {"quiet": True}, {}, trainer, world=2)
    strategy = {**TWO, "pipeline_parallel_size": 2, "num_microbatches": 1, "zero_stage": 3, "quiet": True}
    parity.assert_same(run(parity.train, name, 4, strategy, {}, trainer, world=4), wanted, 1e-5)


@pytest.mark.parametrize(
    ("kind", "world", "zero_stage"), [("Adversarial", 2, 1), long("Adversarial", 4, 3), ("AdversarialBackward", 4, 0)]
)
def test_adversarial_steps(kind, world, zero_stage):
    """By hand, with an optimizer for each network that takes all of its tensors at once."""
    name, trainer = f"tests.experts.trained:{kind}", {"max_epochs": 1}
    wanted = parity.reference(name, {}, trainer)
    for got in run(
        parity.train, name, world, {**TWO, "zero_stage": zero_stage, "quiet": True}, {}, trainer, world=world
    ):
        for what in ("losses", "weights"):
            torch.testing.assert_close(got[what], wanted[what], rtol=1e-5, atol=1e-5)


def losses(kind, world, strategy):
    seed_everything(7, verbose=False)
    module = build(f"tests.experts.trained:{kind}")
    trainer = make_trainer(world, strategy, quiet=True, max_steps=10, max_epochs=-1, precision="bf16-mixed")
    trainer.fit(module)
    (checked,) = trainer.validate(module, verbose=False)  # whole on each rank
    return [*module.seen, checked["val_loss"]]


@pytest.mark.parametrize(("kind", "zero_stage"), [("Qwen3", 0), ("Qwen3", 3), ("Listed", 0)])
def test_mixed_precision_is_near_that_of_one_device(kind, zero_stage):
    (wanted,) = run(losses, kind, 1, None, world=1)
    for got in run(losses, kind, 2, {**TWO, "zero_stage": zero_stage}, world=2):
        assert got == pytest.approx(wanted, rel=5e-3)
