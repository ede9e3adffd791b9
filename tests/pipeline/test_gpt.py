"""A hand-written GPT, unchanged, over a pipeline: the numbers of one process."""

from functools import partial

import pytest
import torch

from tests.pipeline.loop import assert_same, pipelined, whole
from tests.workers import run
from tests.zoo.batchless import GPT, gpt_batch


def build(tied, steps=6, dropout=0.0, rows=8):
    torch.manual_seed(1)
    return GPT(tied=tied, dropout=dropout), [gpt_batch(rows=rows, seed=index) for index in range(steps)]


@pytest.mark.parametrize(
    ("tied", "schedule"),
    [
        (True, "gpipe"),
        (False, "1f1b"),
        pytest.param(True, "1f1b", marks=pytest.mark.long),
        pytest.param(False, "gpipe", marks=pytest.mark.long),
    ],
)
def test_parity(schedule, tied):
    reference = whole(partial(build, tied))
    for result in run(pipelined, partial(build, tied), schedule, 4, 1, 1, True, world=2, group=True):
        assert_same(result, reference)
