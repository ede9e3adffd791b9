"""A small module is one unit where a step frees no parameters: the numbers are those of one device."""

import pytest
from lightning.pytorch import Trainer

from lightning_3d import Strategy3D
from lightning_3d.zero import shard_units
from tests.parity import QUIET, assert_same, long, reference, train
from tests.workers import TOGETHER_BYTES, run
from tests.zoo import MODULES


def _together(function, *args):
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(shard_units, "TOGETHER_BYTES", TOGETHER_BYTES)
        return function(*args)


def _units(name, strategy):
    strategy = Strategy3D(**strategy, quiet=True)
    found = []
    module = MODULES[name]()
    module.on_train_start = lambda: found.append(len(strategy.run.data.groups))
    Trainer(**QUIET, devices=2, strategy=strategy, max_steps=1).fit(module)
    return found[0]


@pytest.mark.parametrize(("stage", "together"), [(1, True), (2, True), (3, False)])
def test_one_unit(stage, together):
    for units in run(_together, _units, "GPT", {"zero_stage": stage}, world=2):
        assert (units == 1) == together


def test_more_bytes_and_several_dtypes_are_units_of_their_own(monkeypatch):
    module = MODULES["GPT"]()
    monkeypatch.setattr(shard_units, "TOGETHER_BYTES", sum(p.nbytes for p in module.parameters()) + 1)
    assert shard_units._is_small(module)
    monkeypatch.setattr(shard_units, "TOGETHER_BYTES", sum(p.nbytes for p in module.parameters()))
    assert not shard_units._is_small(module)
    monkeypatch.setattr(shard_units, "TOGETHER_BYTES", TOGETHER_BYTES)
    next(module.parameters()).data = next(module.parameters()).data.double()
    assert not shard_units._is_small(module)


@pytest.mark.parametrize(
    ("world", "strategy", "flags"),
    [
        (2, {"zero_stage": 1}, {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}),
        (2, {"zero_stage": 2}, {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}),
        long(2, {"zero_stage": 2, "recompute": "full"}, {}),
        long(4, {"zero_stage": 2, "zero_shard_size": 2}, {}),
        long(4, {"zero_stage": 1, "tensor_parallel_size": 2}, {}),
        (4, {"zero_stage": 1, "pipeline_parallel_size": 2}, {"accumulate_grad_batches": 2}),
    ],
    ids=["zero1", "zero2", "recomputed", "hybrid", "tensor", "pipeline"],
)
def test_it_trains_as_on_one_device(world, strategy, flags):
    attributes, flags = {"optimizer": "plain_sgd"}, {"max_epochs": 2, **flags}
    wanted = reference("GPT", attributes, flags)
    assert_same(run(_together, train, "GPT", world, strategy, attributes, flags, world=world), wanted, 1e-4)
