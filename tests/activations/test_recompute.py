"""With recompute, training is bit for bit what it is without."""

import pytest
import torch

from lightning_3d import Strategy3D
from lightning_3d.errors import ConfigurationError
from tests.parity import assert_parity, train
from tests.workers import run

PLAIN = "tests.activations.models:Plain"
TOKENS = "tests.activations.models:Tokens"
ODD = "tests.activations.models:OddOnes"


def results(name, world, strategy, trainer=None, attributes=None):
    return run(train, name, world, strategy, attributes or {}, {"max_epochs": 2, **(trainer or {})}, world=world)


def assert_identical(got, wanted):
    """Losses, gradients and weights, buffers too, are equal to the last bit."""
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert mine["norms"] == theirs["norms"]
        for one, other in zip(mine["gradients"], theirs["gradients"], strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)
        assert mine["weights"].keys() == theirs["weights"].keys()
        assert all(torch.equal(mine["weights"][key], theirs["weights"][key]) for key in mine["weights"])


LAYOUTS = {
    "one": (1, {}),
    "zero0": (2, {"zero_stage": 0}),
    "zero2": (2, {"zero_stage": 2}),
    "zero3": (2, {"zero_stage": 3}),
    "tensor": (2, {"tensor_parallel_size": 2}),
    "sequence": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "pipeline": (2, {"pipeline_parallel_size": 2}),
}


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_is_drawn_alike(layout, mode):
    world, strategy = LAYOUTS[layout]
    wanted = results(TOKENS, world, strategy)
    assert_identical(results(TOKENS, world, {**strategy, "recompute": mode}), wanted)
