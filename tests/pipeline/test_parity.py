"""Unchanged modules over a pipeline: loss and every parameter as on one process."""

import itertools
from functools import partial

import pytest
import torch
from torch import nn

from tests.pipeline.loop import assert_same, pipelined, whole
from tests.workers import run
from tests.zoo.batchless import GPT, build, gpt_batch


def check(module, world, *args, steps=4, rows=8, accumulate=1, **options):
    made = partial(build, module, steps, rows)
    reference = whole(made, accumulate)
    for result in run(partial_pipelined, made, args, accumulate, options, world=world, group=True):
        assert_same(result, reference)
    return reference


def partial_pipelined(made, args, accumulate, options):
    return pipelined(made, *args, accumulate=accumulate, **options)


@pytest.mark.parametrize("module", ["Residual", "UNet"])  # others are in test_matrix.py
def test_three_stages_and_uneven_microbatches(module):
    check(module, 3, "1f1b", 3, validate=True)


SCHEDULES = ["gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev", "loopedbfs"]


def _scheduled():
    """A chain under every schedule; two chains that share an output under one of each kind of placement."""
    for module, schedule in itertools.product(["Residual", "T5"], SCHEDULES):
        quick = module == "Residual" or schedule in ("interleaved_1f1b", "zbv_zero_bubble")
        yield pytest.param(module, schedule, marks=() if quick else pytest.mark.long)


@pytest.mark.parametrize(("module", "schedule"), list(_scheduled()))
def test_every_schedule(schedule, module):
    check(module, 2, schedule, 4, per_rank=1 if schedule == "gpipe" else 2)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 8, "auto"])
def test_any_number_of_microbatches(microbatches):
    check("Residual", 2, "1f1b", microbatches, accumulate=3, steps=6, rows=7)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_small_batches(rows):
    check("Encoder", 2, "1f1b", 4, rows=rows, steps=2)


def test_batch_norm_agrees_when_the_batch_is_not_cut():
    """With several microbatches it normalizes over each, as under any pipeline."""
    check("BatchNorm", 2, "1f1b", 1, validate=True)


def shapes_that_change():
    torch.manual_seed(1)
    batches = [
        gpt_batch(rows=rows, length=length, seed=rows) for rows, length in [(8, 10), (3, 6), (8, 7), (8, 10), (1, 4)]
    ]
    return GPT(layers=2), batches


def test_shapes_that_change_from_step_to_step():
    reference = whole(shapes_that_change)
    for result in run(pipelined, shapes_that_change, "1f1b", 4, 1, 1, True, world=2, group=True):
        assert_same(result, reference)


def recomputing(reentrant):
    module, batches = build("Llama")
    module.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return module, batches


@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_computed_again_in_backward(reentrant):
    """Hugging Face recomputes around the call of a block, so hooks and stand-ins are met again in backward."""
    (reference,) = run(whole, partial(recomputing, False), world=1)
    for result in run(pipelined, partial(recomputing, reentrant), "1f1b", 4, world=2, group=True):
        assert_same(result, reference)


class Contrastive(nn.Module):
    """A loss over all pairs in the batch, which no mean over microbatches gives."""

    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))
        self.right = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8))

    def training_step(self, batch, batch_idx):
        logits = self.left(batch["x"]) @ self.right(batch["x"].flip(1)).T
        loss = nn.functional.cross_entropy(logits, torch.arange(len(logits)))
        self.log("loss", loss)
        return {"loss": loss, "logits": logits}


def contrastive():
    torch.manual_seed(1)
    return Contrastive(), build("MLP")[1]


@pytest.mark.parametrize("microbatches", [2, 3])
def test_loss_on_the_whole_batch(microbatches):
    reference = whole(contrastive)
    for result in run(batch_loss, microbatches, world=2, group=True):
        assert_same(result, reference)


def batch_loss(microbatches):
    return pipelined(contrastive, "1f1b", microbatches, loss_scope="batch")


def noisy(name, world_microbatches):
    torch.manual_seed(3)
    return pipelined(partial(build, name), "1f1b", world_microbatches)[0]


def dropped():
    torch.manual_seed(1)
    return GPT(dropout=0.2), [gpt_batch(seed=index) for index in range(3)]


def with_dropout():
    return pipelined(dropped, "1f1b", 4)[0]


def test_noise_and_dropout_are_reproducible_and_do_not_depend_on_the_stages():
    denoised = run(noisy, "Denoiser", 2, world=2, group=True)
    assert denoised[0] == denoised[1]
    assert denoised[0] == run(noisy, "Denoiser", 2, world=2, group=True)[0]
    assert denoised[0] == pytest.approx(run(noisy, "Denoiser", 2, world=3, group=True)[0], abs=1e-6)
    first = run(with_dropout, world=2, group=True)[0]
    assert first == pytest.approx(run(with_dropout, world=3, group=True)[0], abs=1e-6)
    assert first != pytest.approx(whole(dropped)[0], abs=1e-3)
