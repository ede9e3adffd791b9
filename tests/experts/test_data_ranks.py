"""Training with experts over data ranks is training on one device."""

import pytest


from tests.parity import assert_parity


def assert_same(kind, world, **strategy):
    trainer = strategy.pop("trainer", {"gradient_clip_val": 0.5})
    return assert_parity(f"tests.experts.trained:{kind}", world, {"quiet": True, **strategy}, trainer=trainer, steps=20)


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3"])
def test_two_ranks(kind):
    assert_same(kind, 2, expert_parallel_size=2, zero_stage=0)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_replicas_share_shards_of_experts(zero_stage):
    assert_same("Mixtral", 4, expert_parallel_size=2, zero_stage=zero_stage, verify="replicas")
