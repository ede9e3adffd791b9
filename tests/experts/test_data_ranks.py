"""Training with experts over data ranks is training on one device."""

import pytest

from tests.experts import trained
from tests.parity import assert_parity


def assert_same(kind, world, **strategy):
    trainer = strategy.pop("trainer", {"gradient_clip_val": 0.5})
    return assert_parity(getattr(trained, kind), world, {"quiet": True, **strategy}, trainer=trainer, steps=20)


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3"])
def test_two_ranks(kind):
    assert_same(kind, 2, expert_parallel_size=2, zero_stage=0)
