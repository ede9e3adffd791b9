"""`Strategy3D(verify=...)` stays silent where all is well and finds what is planted."""

import os

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything

from lightning_3d import Strategy3D
from lightning_3d.errors import ConfigurationError, DivergenceError
from tests.modules import GPT
from tests.parity import QUIET, assert_parity
from tests.workers import run

LAYOUTS = {
    "zero0": (2, {"zero_stage": 0}),
    "zero3": (2, {"zero_stage": 3}),
    "tensor": (2, {"tensor_parallel_size": 2}),
    "pipeline": (2, {"pipeline_parallel_size": 2}),
    "all": (4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
}


# "all" has every axis but data, "zero3" has that
QUICK = [("zero3", "replicas"), ("all", "first_step")]
CASES = [
    pytest.param(layout, verify, marks=() if (layout, verify) in QUICK else pytest.mark.long)
    for layout in LAYOUTS
    for verify in ("first_step", "replicas")
]


@pytest.mark.parametrize(("layout", "verify"), CASES)
def test_silent_where_all_is_well(layout, verify):
    world, strategy = LAYOUTS[layout]
    flags = {"accumulate_grad_batches": 2, "max_epochs": 2} if verify == "first_step" else {"max_epochs": 6}
    assert_parity("GPT", world, {**strategy, "verify": verify}, trainer=flags)


class Wrong(GPT):
    """Its gradients are scaled once it is split and trains, or a weight drifts on rank 1."""

    drift = training_began = False

    def on_train_start(self):
        self.training_began = True

    def on_after_backward(self):
        if self.drift and os.environ["RANK"] == "1":
            weight = self.norm.weight
            (weight.to_local() if hasattr(weight, "to_local") else weight).data.add_(1e-6)

    def loss(self, batch):
        split = self.training_began and any(p.is_meta or hasattr(p, "to_local") for p in self.parameters())
        return super().loss(batch) * (1.01 if split and not self.drift else 1.0)


def _fit(verify, drift, strategy, world):
    seed_everything(7, verbose=False)
    module = Wrong()
    module.drift = drift
    chosen = Strategy3D(**strategy, verify=verify)
    flags = {"devices": world, "strategy": chosen, "max_epochs": 8, "limit_val_batches": 0}
    try:
        Trainer(**{**QUIET, **flags}).fit(module)
    except DivergenceError as error:
        return str(error)
    return None


@pytest.mark.parametrize("layout", ["zero3", "tensor", "pipeline"])
def test_a_wrong_scale_is_found_in_the_first_step(layout):
    world, strategy = LAYOUTS[layout]
    for said in run(_fit, "first_step", False, strategy, world, world=world):
        assert said is not None
        assert "from the unsplit module's is 1.0e-02" in said


@pytest.mark.parametrize("layout", ["zero0", "tensor"])
def test_a_drifting_replica_is_named(layout):
    world, strategy = LAYOUTS[layout]
    for said in run(_fit, "replicas", True, strategy, world, world=world):
        assert said is not None
        # tensor ranks share activations: what drifts on one bends the gradients of everything else
        first = "norm.weight" if layout == "zero0" else "positions.weight"
        assert f"before training batch 25, {first} is not the same on ranks 0 and 1" in said


@pytest.mark.parametrize("axis", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_copies_stay_equal_whose_gradients_travel_in_other_company(axis):
    """Norms on tensor ranks, tied tables on stages: int8 once rounded them by what stood beside them."""
    strategy = {axis: 2, "zero_stage": 0, "grad_compression": "int8"}
    assert run(_fit, "replicas", False, strategy, 4, world=4) == [None] * 4


def test_unknown_values_are_refused():
    with pytest.raises(ConfigurationError, match="verify='always'"):
        Strategy3D(verify="always")


def test_digest_sees_order_and_bits():
    from lightning_3d.verify import digest

    x = torch.arange(8.0)
    assert digest(x) == digest(x.clone())
    assert digest(x) != digest(x.flip(0))
    assert digest(x) != digest(x.nextafter(torch.tensor(9.0)))
