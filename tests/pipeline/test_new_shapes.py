"""A batch of a new shape costs a step of a pipeline little."""

from collections import Counter

import pytest
import torch
from lightning.pytorch import Callback

from lightning_3d.pipeline import prove
from lightning_3d.pipeline.wire import Wire
from tests.parity import fit
from tests.workers import run
from tests.zoo.language import GPT

LENGTHS = [8, 8, 6, 4, 6, 5]
"""The shapes of the first batch are proven ahead of training."""


class Lengths(GPT):
    def training_step(self, batch, batch_idx):
        loss = self.loss((batch,))
        self.log("loss", loss)
        return loss


class Count(Callback):
    """What each step does ahead of its microbatches."""

    def __init__(self, now):
        self.now, self.steps = now, []

    def on_train_batch_start(self, *_):
        self.now.clear()

    def on_train_batch_end(self, *_):
        self.steps.append(dict(self.now))


def _counted():
    now = Counter()
    count = Count(now)
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((prove, "_run_together"), (prove, "_run_in_stages"), (Wire, "agree")):
            patch.setattr(owner, name, _counting(getattr(owner, name), now, name))
        texts = [torch.randint(0, 8, (4, length)) for length in LENGTHS]
        fit(
            lambda: (Lengths(), texts),
            {"pipeline_parallel_size": 2, "num_microbatches": 2},
            max_epochs=1,
            callbacks=[count],
        )
    return count.steps


def _counting(original, now, name):
    def call(*args, **kwargs):
        now[name] += 1
        return original(*args, **kwargs)

    return call


def test_a_new_shape_runs_once_on_all_ranks_and_meets_them_once():
    once = {"_run_together": 1, "agree": 1}
    for steps in run(_counted, world=2):
        assert steps == [{}, {}, once, once, {}, once]
