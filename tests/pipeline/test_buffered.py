"""A user is told of buffers in which microbatches leave something else than a whole batch."""

import warnings

import pytest
import torch
from torch import nn

from lightning_3d.pipeline.buffered import buffers_differ
from tests.pipeline import unseen
from tests.pipeline.fitting import fit
from tests.workers import run


def _replaced(module, rows):
    module.mean = 0.9 * module.mean + 0.1 * rows.mean()


CHANGES = {
    "nothing": lambda module, rows: None,
    "steps": lambda module, rows: module.steps.add_(1),
    "mean": _replaced,
    "rows": lambda module, rows: module.steps.add_(len(rows)),
    "queue": lambda module, rows: module.queue.copy_(torch.cat([module.queue, rows])[-6:]),
    "random": lambda module, rows: module.mean.normal_(),
}
TOLD = {"steps": "steps", "mean": "mean"}


@pytest.mark.parametrize("change", CHANGES)
def test_what_each_microbatch_changes_once_more_is_named(change):
    module = nn.Module()
    for name, value in {"steps": torch.tensor(0), "mean": torch.ones(()), "queue": torch.zeros(6)}.items():
        module.register_buffer(name, value)

    def step(rows, seed):
        torch.manual_seed(seed)
        CHANGES[change](module, rows)

    text = buffers_differ(module, step, torch.arange(8.0), [2, 2, 2, 2])
    assert (text or "None").startswith(f"what they leave in {TOLD[change]} is not" if change in TOLD else "None")
    assert (module.steps.item(), module.mean.item(), module.queue.sum().item()) == (0, 1, 0)


class Counted(unseen.Deep):
    """Counts its steps in a buffer, as a warm-up of the loss does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.tensor(0))

    def loss(self, batch):
        self.steps += 1
        return super().loss(batch) * (1 + 0.1 * self.steps)


def counted():
    torch.manual_seed(1)
    module = Counted()
    return module, module.batches(2)


def told():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(counted, {"pipeline_parallel_size": 2, "num_microbatches": 4})
    return [str(warning.message) for warning in caught if "what they leave in" in str(warning.message)]


def test_steps_that_count_microbatches_are_said():
    (text,), _ = run(told, world=2)
    assert "what they leave in steps is not what a whole batch leaves there" in text
