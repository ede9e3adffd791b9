"""Unchanged modules over a pipeline: loss and every parameter as on one process. Others are in `test_matrix.py`."""

import itertools
from functools import partial

import pytest
import torch

from tests.parity import check, fit_with
from tests.pipeline.test_matrix import made
from tests.workers import run
from tests.zoo.batchless import GPT, gpt_batch


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
    """The losses on each rank."""
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
