"""Every layout on cards whose messages, copies and streams are late, with the numbers of one host."""

from collections import Counter
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from lightning_3d import Strategy3D
from lightning_3d.axes import ring_wire
from tests.checkpoint.trainings import train as save_or_resume
from tests.device import waits
from tests.device.accelerator import CardAccelerator
from tests.device.ranks import run
from tests.gpu.test_shared_card import LAYOUTS
from tests.parity import QUIET, assert_same, build, change_differs, in_turn, long, reference, train
from tests.workers import run as run_on_hosts

SHORT = {"zero0", "zero3", "tensor", "pipeline"}
DELAYS = 0.002
ROUNDING = 2**-8


def layouts(short=SHORT):
    return [name if name in short else long(name) for name in LAYOUTS]


def _compare(name, trainer, attributes, tolerance):
    world, arguments = LAYOUTS[name]
    wanted = reference("GPT", attributes, trainer)
    flags = {**trainer, "accelerator": CardAccelerator()}
    got = run(train, "GPT", world, {**arguments, "quiet": True}, attributes, flags, world=world, delays=DELAYS)
    assert_same(got, wanted, tolerance)


@pytest.mark.parametrize("name", layouts())
def test_a_layout_trains_on_late_cards_with_the_numbers_of_the_host(name):
    trainer = {"max_epochs": 1, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    rounding = 1e-2 if "grad_compression" in LAYOUTS[name][1] else 1e-4
    _compare(name, trainer, {"optimizer": "plain_sgd"}, rounding)


def _with_a_timeout(*args):
    with patch.object(ring_wire, "timeout_of", lambda group: timedelta(seconds=60)):  # groups of NCCL have one
        return train(*args)


def test_our_ring_sends_no_host_tensor_between_cards():
    flags, ring = {"max_epochs": 1, "accelerator": CardAccelerator()}, {"zero_stage": 3, "grad_sync": "ring"}
    run(_with_a_timeout, "GPT", 2, {**ring, "quiet": True}, {}, flags, world=2)


@pytest.mark.parametrize("name", in_turn(["optimizer", "offload"], 2))
def test_states_in_host_memory_give_the_numbers_of_the_host(name):
    """The other tests of layouts have none."""
    _compare(name, {"max_epochs": 1}, {}, 1e-4)


@pytest.mark.parametrize("name", in_turn(["zero3", "tensor", "pipeline"], 3))
def test_a_layout_in_half_precision(name):
    trainer, attributes = {"max_epochs": 1, "precision": "bf16-mixed"}, {"optimizer": "plain_sgd"}
    world, arguments = LAYOUTS[name]
    wanted, full = reference("GPT", attributes, trainer), reference("GPT", attributes, {"max_epochs": 1})
    flags = {**trainer, "accelerator": CardAccelerator()}
    for got in run(train, "GPT", world, {**arguments, "quiet": True}, attributes, flags, world=world, delays=DELAYS):
        assert change_differs(got, wanted) < 8 * ROUNDING
        assert change_differs(got, full) > ROUNDING / 8


@pytest.mark.parametrize(("before", "after"), in_turn([("zero3", "tensor"), ("tensor x pipeline", "offload")], 2))
def test_a_checkpoint_goes_on_in_another_layout(tmp_path, before, after):
    path, trainer = str(tmp_path / "saved"), {"accelerator": CardAccelerator()}
    (world, saved), (others, resumed) = LAYOUTS[before], LAYOUTS[after]
    (whole,) = run_on_hosts(save_or_resume, "GPT", 1, None, 5, world=1)
    run(save_or_resume, "GPT", world, {**saved, "quiet": True}, 3, None, path, "adamw", trainer, world=world)
    again = "GPT", others, {**resumed, "quiet": True}, 5, path, None, "adamw", trainer
    for result in run(save_or_resume, *again, world=others, delays=DELAYS):
        torch.testing.assert_close(result["losses"][-2:], whole["losses"][-2:], rtol=1e-4, atol=1e-4)


class Waits(Callback):
    """Where the host waited for the card in five steps, none of which is compared with a whole one."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 9:
            self.reads = waits.noted()
            self.places = self.reads.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 13:
            self.reads.__exit__(None, None, None)


def steady(strategy, world):
    """The files that read in steady steps, and how often."""
    callback, module = Waits(), build("GPT")
    module.samples = 200
    module.on_train_batch_end = lambda *_: None  # reads the loss
    flags = {"accelerator": CardAccelerator(), "devices": world, "max_steps": 15, "limit_val_batches": 0}
    flags |= {"callbacks": [callback], "gradient_clip_val": 0.5}
    Trainer(**{**QUIET, **flags}, strategy=Strategy3D(**strategy, quiet=True)).fit(module)
    return Counter(Path(place.split(": ")[1].split(":")[0]).name for place in callback.places)


READ = {"offload": {"clip_grad.py": 5, "_fsdp_param_group.py": 200}, "optimizer": {"stand_ins.py": 5}}
"""Gradients in host memory are scaled by a norm of the card. An update on the host waits for them, FSDP2 for each."""
LATE = {"across_samples.py": 5}
"""A pipeline looks at the labels of the step before, behind their event."""


@pytest.mark.parametrize("name", layouts({*SHORT, "optimizer"}))
def test_the_host_waits_for_nothing_in_a_steady_step(name):
    world, arguments = LAYOUTS[name]
    wanted = READ.get(name, {}) | (LATE if "pipeline_parallel_size" in arguments else {})
    assert run(steady, arguments, world, world=world) == [wanted] * world
