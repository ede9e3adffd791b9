"""Training with experts over data ranks is training on one device, and so is a whole run with what it does beside steps."""

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import WeightAveraging
from torch.optim.swa_utils import get_ema_avg_fn

from tests import parity
from tests.parity import assert_parity, build, long, make_trainer
from tests.workers import run

TWO = {"expert_parallel_size": 2}


def assert_same(kind, world, trainer=None, **strategy):
    trainer = {"gradient_clip_val": 0.5, **(trainer or {})}
    name = f"tests.experts.trained:{kind}"
    return assert_parity(name, world, {"quiet": True, **strategy}, trainer=trainer, steps=10)


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3", "DeepSeek", "GptOss", "Olmoe", "Batched", "Eager"])
def test_two_ranks(kind):
    assert_same(kind, 2, **TWO, zero_stage=0)


@pytest.mark.parametrize(
    ("kind", "world", "strategy"),
    [
        ("Products", 2, {"zero_stage": 1}),
        ("TopProducts", 4, {"zero_stage": 3, "verify": "replicas"}),
        ("Products", 4, {"expert_parallel_size": 4, "zero_stage": 2}),
        ("TopProducts", 4, {"zero_stage": 1, "tensor_parallel_size": 2}),
        ("Products", 4, {"zero_stage": 1, "pipeline_parallel_size": 2, "num_microbatches": 2}),
        ("TopProducts", 2, {"zero_stage": 0, "recompute": "full"}),
    ],
    ids=["two", "replicas", "four", "tensor", "stages", "recomputed"],
)
def test_products_over_all_experts_at_once(kind, world, strategy):
    assert_same(kind, world, **{**TWO, **strategy})


@pytest.mark.parametrize(("world", "zero_stage"), [(2, 0), (2, 1), (4, 0), (4, 2)])
def test_experts_without_tokens_step_as_on_one_device(world, zero_stage):
    """Weight decay and momentum go on."""
    assert_same("Lonely", world, **TWO, zero_stage=zero_stage)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_replicas_share_shards_of_experts(zero_stage):
    assert_same("Mixtral", 4, **TWO, zero_stage=zero_stage, verify="replicas")


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_gradients_accumulate(zero_stage):
    assert_same("Qwen3", 2, {"accumulate_grad_batches": 2}, **TWO, zero_stage=zero_stage)


@pytest.mark.parametrize(
    "strategy",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2, "num_microbatches": 2},
        {"context_parallel_size": 2, "zero_stage": 3},
        {"recompute": "full"},
        {"recompute": "selective"},
    ],
    ids=["tensor", "pipeline", "context", "full", "selective"],
)
def test_beside_other_axes(strategy):
    few = {"recompute", "context_parallel_size"} & strategy.keys()
    assert_same("Mixtral", 2 if few else 4, **TWO, **{"zero_stage": 1, **strategy})


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
