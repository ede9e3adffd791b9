"""A user whose loss is no mean over samples is told so."""

import warnings

import pytest
import torch
from torch.nn import functional as F

from lightning_3d.pipeline.means import unlike_its_mean
from tests.pipeline import unseen
from tests.pipeline.fitting import check, fit
from tests.workers import run


def test_a_mean_is_a_mean():
    batch = {"x": torch.arange(8.0), "weights": torch.ones(3)}
    assert unlike_its_mean(lambda rows, seed: float(rows["x"].mean()), batch, [3, 3, 2]) is None
    assert unlike_its_mean(lambda rows, seed: float(rows["x"].mean()) + seed, batch, [3, 3, 2]) is None
    assert unlike_its_mean(lambda rows, seed: None, batch, [3, 3, 2]) is None
    by_chance = {0: 1.0, 1: 1.0, 2: 2.0}  # noise that comes out alike twice
    assert unlike_its_mean(lambda rows, seed: float(rows["x"].sum()) * by_chance[seed], batch, [3, 3, 2]) is None
    assert unlike_its_mean(lambda rows, seed: float(rows["x"].sum()), batch, [8]) is None


def test_a_sum_is_none():
    text = unlike_its_mean(lambda rows, seed: float(rows.sum()), torch.arange(8.0), [3, 3, 2])
    assert "the loss on 6 samples is 15, the mean of the losses on 3 and on 3 of them 7.5" in text


def test_rows_that_are_full_hide_no_padding_behind_them():
    labels = torch.arange(80).view(8, 10)
    labels[5, 3:] = -100  # in the third of four microbatches
    mean = lambda rows, seed: float(rows["labels"][rows["labels"] >= 0].double().mean())  # noqa: E731
    text = unlike_its_mean(mean, {"labels": labels, "scale": torch.ones(3)}, [2, 2, 2, 2])
    assert "it is no mean over samples" in text


class Masked(unseen.EmbeddingSkip):
    """A mean over tokens that are not padding, of which rows have different numbers."""

    def loss(self, batch):
        tokens, targets = batch
        targets = targets.masked_fill(
            torch.arange(10)[None] > torch.arange(8)[: len(tokens), None] + targets[:, :1] % 5, -100
        )
        logits = F.linear(self.blocks(self.embed(tokens)), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def told(scope):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(masked, {"pipeline_parallel_size": 2, "num_microbatches": 4, "loss_scope": scope})
    return [str(warning.message) for warning in caught if "no mean over samples" in str(warning.message)]


def masked():
    torch.manual_seed(1)
    module = Masked()
    return module, module.batches(5)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_whole_batch_gives_its_exact_loss(accumulate):
    strategy = {"num_microbatches": 3, "loss_scope": "batch"}
    check(masked, 2, strategy, validate=True, accumulate_grad_batches=accumulate)


@pytest.mark.parametrize(("scope", "count"), [("microbatch", 1), ("batch", 0)])
def test_padding_that_is_uneven_is_said(scope, count):
    first, _ = run(told, scope, world=2)
    assert len(first) == count
