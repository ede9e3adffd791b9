"""Resumed in the same layout at the end of an epoch, a run goes on bit for bit."""

import pytest
import torch

from tests.checkpoint.trainings import train
from tests.workers import run


@pytest.mark.parametrize(
    "layout",
    [
        {"zero_stage": 1},
        {"zero_stage": 3},
        {"zero_stage": 1, "grad_compression": "int8"},
        {"zero_stage": 2, "grad_compression": "powersgd"},
    ],
    ids=str,
)
def test_bit_for_bit(tmp_path, layout):
    layout = {"checkpoint_format": "sharded", **layout}
    path = str(tmp_path / "a.ckpt")
    wanted = run(train, "NoisyGPT", 2, layout, 10, world=2)
    run(train, "NoisyGPT", 2, layout, 5, None, path, world=2)
    for got, whole in zip(run(train, "NoisyGPT", 2, layout, 10, path, world=2), wanted, strict=True):
        assert got["losses"] == whole["losses"][5:]
        assert all(torch.equal(got["weights"][name], weight) for name, weight in whole["weights"].items())
