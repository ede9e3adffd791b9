"""Unchanged modules over a pipeline: loss and every parameter as on one process. Others are in `test_matrix.py`.

One asks its parameters for their device, also those that another stage has.
"""

import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.parity import assert_parity, check, fit_with, train
from tests.pipeline.test_matrix import made
from tests.workers import WorkerError, run
from tests.zoo.batchless import GPT, gpt_batch
from tests.zoo.plain import MLP, Base


@pytest.mark.parametrize("module", ["Residual", "UNet"])
def test_three_stages_and_uneven_microbatches(module):
    check(partial(made, module, 4), 3, {"num_microbatches": 3}, validate=True)


SCHEDULES = ["gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev", "loopedbfs"]


def _scheduled():
    """A chain under every schedule; two chains that share an output under one of each kind of placement."""
    for module, schedule in itertools.product(["Residual", "T5"], SCHEDULES):
        quick = module == "Residual" or schedule in ("interleaved_1f1b", "zbv_zero_bubble")
        yield pytest.param(module, schedule, marks=() if quick else pytest.mark.long)


@pytest.mark.parametrize(("module", "schedule"), list(_scheduled()))
def test_every_schedule(schedule, module):
    stages = {} if schedule == "gpipe" else {"stages_per_rank": 2}
    check(partial(made, module, 4), 2, {"schedule": schedule, "num_microbatches": 4, **stages})


@pytest.mark.parametrize("microbatches", [1, 2, 3, 8, "auto"])
def test_any_number_of_microbatches(microbatches):
    strategy = {"num_microbatches": microbatches}
    check(partial(made, "Residual", 6, rows=7), 2, strategy, accumulate_grad_batches=3)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_small_batches(rows):
    check(partial(made, "Encoder", 2, rows=rows), 2, {"num_microbatches": 4})


def test_batch_norm_agrees_when_the_batch_is_not_cut():
    """With several microbatches it normalizes over each, as under any pipeline."""
    check(partial(made, "BatchNorm", 4), 2, {"num_microbatches": 1}, validate=True)


def shapes_that_change():
    shapes = [(8, 10), (3, 6), (8, 7), (8, 10), (1, 4)]
    return made("GPT", 0)[0], [gpt_batch(rows=rows, length=length, seed=rows) for rows, length in shapes]


def test_shapes_that_change_from_step_to_step():
    check(shapes_that_change, 2, {"num_microbatches": 4}, validate=True)


def recomputing(reentrant):
    module, batches = made("Llama", 4)
    module.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return module, batches


@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_computed_again_in_backward(reentrant):
    """Hugging Face recomputes around the call of a block, so hooks and stand-ins are met again in backward."""
    check(partial(recomputing, reentrant), 2, {"num_microbatches": 4})


def dropped():
    torch.manual_seed(1)
    return GPT(dropout=0.2), [gpt_batch(seed=index) for index in range(3)]


def losses(build, stages, microbatches):
    strategy = {"pipeline_parallel_size": stages, "num_microbatches": microbatches} if stages > 1 else None
    return [got["losses"] for got in run(fit_with, build, strategy, {}, world=stages)]


def test_noise_and_dropout_are_reproducible_and_do_not_depend_on_the_stages():
    noisy = partial(made, "Denoiser", 4)
    denoised = losses(noisy, 2, 2)
    assert denoised[0] == denoised[1]
    assert denoised == losses(noisy, 2, 2)
    assert denoised[0] == pytest.approx(losses(noisy, 3, 2)[0], abs=1e-6)
    first = losses(dropped, 2, 4)[0]
    assert first == pytest.approx(losses(dropped, 3, 4)[0], abs=1e-6)
    assert first != pytest.approx(losses(dropped, 1, 4)[0], abs=1e-3)


class Asking(Base):
    """Makes positions on the device of its first parameter, and a mask on that of a block's buffer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(8, 1)

    tensors = MLP.tensors

    @property
    def first_device(self):
        return next(self.blocks.parameters()).device

    def loss(self, batch):
        x, y = batch
        assert {p.device for p in self.parameters()} == {x.device} == {b.device for b in self.buffers()}
        last = self.blocks[-1][1].running_mean
        x = x + torch.arange(8, device=self.first_device) * torch.full((8,), 0.1, device=last.device)
        for block in self.blocks:
            x = block(x + torch.ones(8, device=self.first_device))
        return F.mse_loss(self.head(x), y) + torch.zeros((), device=self.first_device)

    def on_train_batch_start(self, batch, batch_idx):
        assert torch.ones(3, device=self.first_device).sum() == 3
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.6, 0.6)
        assert torch.ones(3, device=next(self.head.parameters()).device).sum() == 3


@pytest.mark.parametrize("strategy", [{"loss_scope": "batch"}, {"num_microbatches": 1, "schedule": "gpipe"}])
def test_the_device_of_parameters_of_other_stages_is_the_ranks(strategy):
    assert_parity(
        "tests.pipeline.test_parity:Asking", 2,
        {"data_parallel_size": 1, "pipeline_parallel_size": 2, "quiet": True, "num_microbatches": 1, **strategy},
    )  # fmt: skip


class Moving(MLP):
    """Moves its networks to its own device where code often does so."""

    def moved(self, *args):
        assert self.to(self.device) is self.cpu().float()

    on_fit_start = on_train_start = on_train_batch_start = on_before_optimizer_step = on_train_epoch_end = moved

    def configure_optimizers(self):
        self.moved()
        return super().configure_optimizers()


def test_a_module_of_several_stages_moves_to_its_device_in_hooks():
    axes = {"data_parallel_size": 1, "pipeline_parallel_size": 2, "quiet": True, "num_microbatches": 2}
    assert_parity("tests.pipeline.test_parity:Moving", 2, axes)


class Looking(MLP):
    """Looks at outputs of its network before it makes its optimizer."""

    def configure_optimizers(self):
        assert self.net(torch.ones(2, 8)).isfinite().all()
        return super().configure_optimizers()


@pytest.mark.parametrize("strategy", [{"zero_stage": 1}, {"zero_stage": 3}, {"pipeline_parallel_size": 2}])
def test_configure_optimizers_calls_the_module(strategy):
    name, axes = "tests.pipeline.test_parity:Looking", {"quiet": True, **strategy}
    if "zero_stage" in strategy:
        assert_parity(name, 2, axes)
        return
    with pytest.raises(WorkerError, match="configure_optimizers reads numbers of a weight that another stage"):
        run(train, name, 2, axes, {}, {}, world=2)
