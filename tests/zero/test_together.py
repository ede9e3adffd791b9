"""A small module as one unit, where a step frees no parameters, and hybrid shards: the numbers are those of one device."""

import pytest
from lightning.pytorch import Callback, Trainer

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


HYBRID = {"zero_shard_size": 2, "quiet": True}
TWICE = {"max_epochs": 2, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}


@pytest.mark.parametrize(("stage", "tensor"), [long(1, 1), long(2, 1), (3, 1), long(3, 2)])
def test_hybrid_shards_train_as_on_one_device(stage, tensor):
    attributes, world = {"optimizer": "plain_sgd"}, 4 * tensor
    strategy = {**HYBRID, "zero_stage": stage, "grad_sync": "native", "tensor_parallel_size": tensor}
    wanted = reference("GPT", attributes, TWICE)
    got = run(train, "GPT", world, strategy, attributes, TWICE, world=world, timeout=300)
    assert_same(got, wanted, 1e-5 if tensor == 1 else 1e-4)


class Meshes(Callback):
    """Dimensions of the meshes that FSDP2 was given, and whether the seam averages over copies."""

    def on_train_start(self, trainer, module):
        groups = trainer.strategy.run.data.groups
        self.dims = {group.mesh_info.mesh.ndim for group in groups}
        self.ours = {group._all_reduce_hook.__name__ == "_all_reduce" for group in groups}

    def on_train_end(self, trainer, module):
        rows = trainer.strategy.data_axis.ledger.rows()
        self.sent = {(row.axis, row.collective): (row.calls, row.bytes) for row in rows}


def _fit(sync, streams):
    meshes = Meshes()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Strategy3D, "_streams", streams)
        strategy = Strategy3D(**HYBRID, **sync, zero_stage=3)
        flags = {"max_steps": 3, "limit_val_batches": 0, "accumulate_grad_batches": 2, "callbacks": [meshes]}
        Trainer(**{**QUIET, **flags}, devices=4, strategy=strategy).fit(MODULES["GPT"]())
    return meshes.dims, meshes.ours, meshes.sent


def test_who_averages_over_the_copies_and_that_the_bytes_are_the_same():
    ours = run(_fit, {"grad_sync": "ring"}, False, world=4)
    native = run(_fit, {"grad_sync": "native"}, False, world=4)
    streams = run(_fit, {}, True, world=4)
    compressed = run(_fit, {"grad_sync": "native", "grad_compression": "bf16"}, False, world=4)
    for each in (*ours, *compressed):
        assert each[:2] == ({1}, {True})
    for each, ring in zip((*native, *streams), (*ours, *ours), strict=True):
        assert each[:2] == ({2}, {False})
        assert each[2] == ring[2]
