"""What the first batch does not show: values of several samples that matter in a later one."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from tests.parity import check, fit
from tests.pipeline.test_loss_scope import scope_of
from tests.workers import WorkerError, run
from tests.zoo.carried import Chain

FOUR = {"pipeline_parallel_size": 2, "num_microbatches": 4}


class Scaled(Chain):
    """A scale of each sample. One without data has the mean of the others."""

    def forward(self, x):
        total, seen = x.abs().sum(1), (x != 0).sum(1)
        usual = total.sum() / seen.sum().clamp(min=1)
        return super().forward(x / torch.where(seen > 0, total / seen.clamp(min=1), usual)[:, None].detach())

    def loss(self, batch):
        return F.cross_entropy(self(batch["x"]) * 1.0, batch["y"])


class Counted(Chain):
    """A mean over the samples that count."""

    def loss(self, batch):
        each = F.cross_entropy(self(batch["x"]), batch["y"], reduction="none")
        return (each * batch["counts"]).sum() / batch["counts"].sum()


class CountedInPython(Chain):
    """The same, by a number of Python."""

    def loss(self, batch):
        each = F.cross_entropy(self(batch["x"]), batch["y"], reduction="none")
        return (each * batch["counts"]).sum() / (batch["counts"] > 0).sum().item()


class Chosen(Chain):
    """Labels that the step leaves out by other values of the batch."""

    def loss(self, batch):
        labels = batch["y"].clone()
        labels[batch["counts"] == 0] = -100
        return F.cross_entropy(self(batch["x"]), labels)


class Labelled(Chain):
    """Labels that cross entropy leaves out."""

    def loss(self, batch):
        return F.cross_entropy(self(batch["x"]), batch["y"].roll(0).clone())


class Plain(Chain):
    """A mean over samples, with a value of all of them that is only logged, and one that takes no part in the loss."""

    def loss(self, batch):
        output = self(batch["x"])
        self.log("share", (output.argmax(1) == batch["y"]).float().mean())
        self.log("right", float((output.argmax(1) == batch["y"]).sum().item()))
        scale = torch.where(batch["x"].isnan(), 0.0, batch["x"]).mean()
        self.log("scaled", scale)
        return F.cross_entropy(output, batch["y"]) + 0.1 * output.square().mean()


def of(kind, later):
    torch.manual_seed(1)
    batches = kind().batches(3)
    for at, batch in enumerate(batches):
        batch["counts"] = torch.ones(len(batch["y"]))
        if at:
            later(batch)
    return kind(), batches


def without_data(batch):
    batch["x"][1] = 0


def count_less(batch):
    batch["counts"][:3] = 0


def leave_out(batch):
    batch["y"][:3] = -100


def leave_out_evenly(batch):
    batch["y"][::2] = -100


def test_a_value_that_other_samples_meet_is_said():
    scopes, said = run(scope_of, partial(of, Scaled, without_data), world=2)[0]
    assert scopes == {"microbatch"}
    assert any("other samples meet it ahead of the last block (test_later_batches.py:" in each for each in said)
    check(partial(of, Scaled, without_data), 2, {"num_microbatches": 1})


@pytest.mark.parametrize("kind", [Counted, CountedInPython, Chosen])
def test_a_count_of_what_takes_part_moves_the_loss_to_the_full_batch(kind):
    assert run(scope_of, partial(of, kind, count_less), world=2)[0][0] == {"batch"}
    check(partial(of, kind, count_less), 2, {"num_microbatches": 4})


def test_labels_that_are_left_out_later_are_refused_on_every_rank():
    with pytest.raises(WorkerError, match=r"cross_entropy leaves out some labels .*loss_scope='batch'") as error:
        run(fit, partial(of, Labelled, leave_out), FOUR, world=2)
    assert str(error.value).count("--- rank") == 2
    check(partial(of, Labelled, leave_out), 2, {"num_microbatches": 4, "loss_scope": "batch"})


def test_labels_that_are_left_out_evenly_train():
    check(partial(of, Labelled, leave_out_evenly), 2, {"num_microbatches": 4})


def test_a_plain_mean_is_left_alone():
    scopes, said = run(scope_of, partial(of, Plain, without_data), world=2)[0]
    assert scopes == {"microbatch"} and not [each for each in said if "meet" in each]
