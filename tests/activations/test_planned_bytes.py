"""Bytes that training keeps for backward are those that the planner says, by the allocator's own record."""

import pytest

from lightning_3d.tools.planner.profile_module import profile_module
from tests.activations.models import Wide
from tests.activations.watching import kept
from tests.parity import long
from tests.workers import run


class Planned(Wide):
    """Takes a batch of one tensor too, as the planner makes it."""

    def loss(self, batch):
        return super().loss(batch if isinstance(batch, list) else [batch])


@pytest.mark.parametrize(
    ("recompute", "layout"),
    [(None, {}), ("full", {}), (None, {"tensor_parallel_size": 2}), long("full", {"tensor_parallel_size": 2})],
)
def test_kept_bytes(recompute, layout):
    world, samples = layout.get("tensor_parallel_size", 1), Wide.batch_size
    name = "tests.activations.test_planned_bytes"
    profile = profile_module(f"{name}.Planned", [], precision="32", tokens=None, inputs=f"{samples}x65:int64")
    block = profile.block_activations(tensor=world, sequence_parallel=False, recompute=recompute or "none")
    planned = samples * (profile.layers * block + profile.last_bytes)
    for found in run(kept, f"{name}:Planned", world, {**layout, "recompute": recompute}, world=world):
        assert found == pytest.approx(planned, rel=0.1)
