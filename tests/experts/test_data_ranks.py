"""Training with experts over data ranks is training on one device."""

import pytest

from tests.parity import assert_parity

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
