"""One CUDA device: every ZeRO stage and precision is plain Lightning's training, at its speed. Several: layouts."""

import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from lightning_3d import Strategy3D
from lightning_3d.layout import Layout
from tests.bench.bench_gpu import Large, measure
from tests.parity import QUIET, assert_same, change_differs, make_trainer, reference, train
from tests.workers import run
from tests.zero.test_outside import assert_freed, weighed
from tests.zoo.language import UntiedGPT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, none is here"),
]
SEVERAL = [
    *((2, {"zero_stage": stage}) for stage in (0, 1, 2, 3)),
    (2, {"tensor_parallel_size": 2}),
    (2, {"pipeline_parallel_size": 2}),
    (2, {"zero_stage": 3, "offload": "all"}),
    (4, {"zero_stage": 3, "zero_shard_size": 2}),
    (4, {"tensor_parallel_size": 2, "zero_stage": 1}),
    (4, {"pipeline_parallel_size": 2, "zero_stage": 2}),
    (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
]
"""Devices and layouts."""
GPU = {"accelerator": "gpu", "max_epochs": 2}
EPS = {"32-true": 0.0, "64-true": 0.0, "bf16-true": 2**-8, "16-true": 2**-11, "bf16-mixed": 2**-8, "16-mixed": 2**-11}


@pytest.mark.parametrize("precision", EPS)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_and_precision_is_plain_lightning(stage, precision):
    trainer = {**GPU, "precision": precision, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    _check("GPT", {"zero_stage": stage}, trainer, EPS[precision])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_evaluation_before_and_between_training_steps(stage):
    """Lightning evaluates under `inference_mode` here: parameters gathered in it could not be trained."""
    trainer = {**GPU, "num_sanity_val_steps": 2, "val_check_interval": 1, "limit_val_batches": 2}
    _check("GPT", {"zero_stage": stage}, trainer)


class Compiled(UntiedGPT):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.compile()


@pytest.mark.parametrize("stage", [0, 3])
def test_compiled_blocks(stage):
    _check(f"{__name__}:Compiled", {"zero_stage": stage}, GPU)


def _several(number):
    """Skips a test that needs `number` devices; each rank has one, as NCCL demands."""
    here = torch.cuda.device_count()
    return pytest.mark.skipif(here < number, reason=f"needs {number} CUDA devices, {here} are here")


def _on_several(layouts):
    return pytest.mark.parametrize(
        ("world", "strategy"), [pytest.param(world, strategy, marks=_several(world)) for world, strategy in layouts]
    )


@_on_several(SEVERAL)
def test_layouts_of_several_devices_are_one_device(world, strategy):
    trainer = {**GPU, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    attributes = {"optimizer": "plain_sgd"}
    wanted = reference("GPT", attributes, trainer)
    assert_same(run(train, "GPT", world, strategy, attributes, trainer, world=world, timeout=300), wanted, 1e-4)


@_several(2)
def test_large_embeddings_and_heads_are_freed_while_blocks_run():
    assert_freed(run(weighed, "gpu", world=2, timeout=300))


class Strict(Callback):
    """torch raises where a host waits for its device, from the sixth step to the fifteenth."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 5:
            torch.cuda.set_sync_debug_mode("error")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 14:
            torch.cuda.set_sync_debug_mode("default")


def _strictly(strategy, devices):
    flags = {"accelerator": "gpu", "devices": devices, "max_steps": 17, "limit_val_batches": 0}
    trainer = Trainer(**{**QUIET, **flags, "callbacks": [Strict()]}, strategy=Strategy3D(**strategy, quiet=True))
    try:
        trainer.fit(Large(width=64, blocks=4, vocabulary=100, length=16, batch=8))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return trainer.global_step


@_on_several([(1, {"zero_stage": stage}) for stage in (0, 3)] + [case for case in SEVERAL if "offload" not in case[1]])
def test_no_host_waits_for_its_device_in_a_steady_step(world, strategy):
    assert run(_strictly, strategy, world, world=world, timeout=300) == [17] * world


def _check(name, strategy, trainer, eps=0.0):
    attributes = {"optimizer": "plain_sgd"}
    wanted = reference(name, attributes, trainer)
    (got,) = run(train, name, 1, strategy, attributes, trainer, world=1, timeout=300)
    if eps == 0.0:
        assert_same([got], wanted, 1e-5)
    else:
        assert change_differs(got, wanted) < 8 * eps
        torch.testing.assert_close(got["losses"], wanted["losses"], rtol=8 * eps, atol=8 * eps)


@contextmanager
def _sharded_alone():
    """One rank shards as several would: FSDP2's streams and hooks run, with a card of its own."""
    before = Layout.shards_data
    Layout.shards_data = property(lambda layout: layout.zero_stage > 0)
    try:
        yield
    finally:
        Layout.shards_data = before


def _alone(function, *args):
    with _sharded_alone():
        return function(*args)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_no_host_waits_for_its_device_where_weights_are_sharded(stage):
    assert run(_alone, _strictly, {"zero_stage": stage}, 1, world=1, timeout=300) == [17]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharded_weights_are_plain_lightning(stage, precision):
    trainer = {**GPU, "precision": precision, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    attributes = {"optimizer": "plain_sgd"}
    wanted = reference("GPT", attributes, trainer)
    (got,) = run(_alone, train, "GPT", 1, {"zero_stage": stage}, attributes, trainer, world=1, timeout=300)
    if precision == "32-true":
        assert_same([got], wanted, 1e-5)
    else:
        assert change_differs(got, wanted) < 8 * EPS[precision]


@pytest.mark.parametrize("offload", ["all", {"optimizer": "cpu"}, {"activations": "cpu"}], ids=str)
def test_copies_between_host_and_card_run_beside_kernels(offload):
    strategy = {"zero_stage": 3, "offload": offload}
    (got,) = run(_alone, partial(measure, blocks=6), strategy, 1, False, world=1, timeout=300)
    print(f"a step of offload {offload} {1e3 * got['seconds']:.1f} ms, copies beside kernels {got['hidden']:.0%}")
    assert got["hidden"] > 0.2


class Clock(Callback):
    """Seconds of a step, over steps between which the host waits for nothing."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 20:
            torch.cuda.synchronize()
            self.began = time.perf_counter()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 59:
            torch.cuda.synchronize()
            self.seconds = (time.perf_counter() - self.began) / 40


def _speed(strategy):
    clock = Clock()
    make_trainer(1, strategy, accelerator="gpu", max_steps=60, precision="bf16-mixed", callbacks=[clock]).fit(Large())
    return clock.seconds


def test_throughput_of_300m_parameters_in_bf16_is_within_2_percent():
    """The best of two turns each, alternating: other work on the device comes and goes."""
    plain, ours = [], []
    for _ in range(2):
        plain += run(_speed, None, world=1, timeout=300)
        ours += run(_speed, {"zero_stage": 1}, world=1, timeout=300)
    print(f"a step of plain Lightning {1e3 * min(plain):.1f} ms, ours {1e3 * min(ours):.1f} ms")
    assert min(ours) < 1.02 * min(plain)
