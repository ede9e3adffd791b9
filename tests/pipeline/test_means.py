"""A user whose loss is no mean over samples is told so."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_3d.pipeline import loss_mean
from lightning_3d.pipeline.loss_mean import MEAN, ROUNDING, StepResult
from lightning_3d.pipeline.microbatch import TENSORS
from lightning_3d.pipeline.step_runs import PeerRuns
from tests.parity import caught_warnings, check, fit
from tests.workers import run
from tests.zoo import oddities


def seen(loss, gradient=()):
    return StepResult(float(loss), torch.tensor(gradient))


def compare_parts(run, batch, sizes, rounding=ROUNDING):
    return loss_mean.compare_parts(run, batch, sizes, rounding, TENSORS, PeerRuns().divide)


def test_a_mean_is_a_mean():
    batch = {"x": torch.arange(8.0), "weights": torch.ones(3)}
    assert compare_parts(lambda rows, seed, *_, **__: seen(rows["x"].mean()), batch, [3, 3, 2]) == MEAN
    assert compare_parts(lambda rows, seed, *_, **__: seen(rows["x"].sum()), batch, [8]) == MEAN


def test_what_cannot_be_compared_is_not_taken_for_a_mean():
    batch = torch.arange(8.0)
    assert compare_parts(lambda rows, seed, *_, **__: seen(rows.mean() + seed), batch, [3, 3, 2]).verdict == "random"
    assert compare_parts(lambda rows, seed, *_, **__: None, batch, [3, 3, 2]).verdict == "unknown"
    assert compare_parts(lambda rows, seed, *_, **__: seen(float("nan")), batch, [3, 3, 2]).verdict == "unknown"
    half = lambda rows, seed, *_, **__: seen(rows.mean() if len(rows) == 8 else float("nan"))  # noqa: E731
    assert compare_parts(half, batch, [3, 3, 2]).verdict == "no mean"


def test_a_sum_is_none():
    text = compare_parts(lambda rows, seed, *_, **__: seen(rows.sum()), torch.arange(8.0), [3, 3, 2]).reason
    assert "the loss on 8 samples is 28, the mean of the losses on 3, 3 and 2 of them is 8.875" in text


def test_a_gradient_tells_where_the_loss_does_not():
    batch = torch.arange(8.0)
    text = compare_parts(lambda rows, seed, *_, **__: seen(1.0, [rows.sum(), 0.0]), batch, [3, 3, 2]).reason
    assert "the gradient on 8 samples differs by 2.2 of itself" in text
    off = compare_parts(lambda rows, seed, *_, **__: seen(1e3 + rows.sum() / 20), batch, [3, 3, 2])
    assert "the loss on 8" in off.reason
    assert compare_parts(lambda rows, seed, *_, **__: seen(1e3 + rows.sum() / 20), batch, [3, 3, 2], 0.05) == MEAN
    assert compare_parts(lambda rows, seed, *_, **__: seen(1.0, [rows.mean(), 0.0]), batch, [3, 3, 2]) == MEAN
    random = compare_parts(lambda rows, seed, *_, **__: seen(1.0, [rows.sum() + seed, 0.0]), batch, [3, 3, 2])
    assert random.verdict == "random"
    assert compare_parts(lambda rows, seed, *_, **__: seen(1.0, [0.0] * len(rows)), batch, [3, 3, 2]) == MEAN


def test_rows_that_are_full_hide_no_padding_behind_them():
    labels = torch.arange(160).view(16, 10)
    labels[13, 3:] = -100  # in the second to last of eight microbatches
    mean = lambda rows, seed, *_, **__: seen(rows["labels"][rows["labels"] >= 0].double().mean())  # noqa: E731
    assert compare_parts(mean, {"labels": labels, "scale": torch.ones(3)}, [2] * 8).verdict == "no mean"


@pytest.mark.parametrize("counts", [(4, 8, 4, 8), (3, 3, 6, 0)])
def test_halves_with_as_many_tokens_hide_no_uneven_quarters(counts):
    """A detector divides by its positive anchors, and an image may have none."""
    labels = torch.arange(40).view(4, 10)
    for row, count in zip(labels, counts, strict=True):
        row[count:] = -100
    mean = lambda rows, seed, *_, **__: seen(rows[rows >= 0].double().sum() / max(1, (rows >= 0).sum()))  # noqa: E731
    assert compare_parts(mean, labels, [1] * 4).verdict == "no mean"


class Masked(oddities.EmbeddingSkip):
    """A mean over tokens that are not padding, of which rows have different numbers."""

    def loss(self, batch):
        tokens, targets = batch
        targets = targets.masked_fill(
            torch.arange(10)[None] > torch.arange(8)[: len(tokens), None] + targets[:, :1] % 5, -100
        )
        logits = F.linear(self.blocks(self.embed(tokens)), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Weighted(oddities.Deep):
    """A mean over classes of unlike weights, with a head that begins with zeros: all samples have the same loss."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def loss(self, batch):
        return F.cross_entropy(self(batch["x"]), batch["y"], weight=torch.tensor([0.1, 1.0, 10.0]))


class Dropping(oddities.Deep):
    def loss(self, batch):
        return F.cross_entropy(self(F.dropout(batch["x"], 0.2)), batch["y"], weight=torch.tensor([0.1, 1.0, 10.0]))


class Fair(oddities.Deep):
    def loss(self, batch):
        return F.cross_entropy(self(F.dropout(batch["x"], 0.2)), batch["y"])


def warned_of(build, scope):
    with caught_warnings() as caught:
        fit(build, {"pipeline_parallel_size": 2, "num_microbatches": 4, "loss_scope": scope})
    return [text for text in caught if "no mean over samples" in text]


def fresh(kind, steps=1):
    torch.manual_seed(1)
    return kind(), kind().batches(steps)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_whole_batch_gives_its_exact_loss(accumulate):
    strategy = {"num_microbatches": 3, "loss_scope": "batch"}
    check(partial(fresh, Masked, 5), 2, strategy, validate=True, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize(("kind", "count"), [(Masked, 1), (Weighted, 1), (Dropping, 1), (Fair, 0)])
def test_neither_alike_losses_nor_dropout_hide_it(kind, count):
    first, _ = run(warned_of, partial(fresh, kind), "microbatch", world=2)
    assert len(first) == count
