"""A user is told of attributes that microbatches cannot change as a whole batch does."""

import pytest
import torch

from lightning_3d.errors import UnsupportedError
from lightning_3d.pipeline.kept import joins_differ


class Plain:
    """Stands for a module."""

    def __init__(self):
        self.losses, self.mean, self.total, self.rows, self.hidden, self.queue = [], None, 0.0, 0, None, torch.zeros(0)


def _hidden(module, rows):
    hidden = rows[None] if module.hidden is None else module.hidden
    module.hidden = hidden + rows[None]


def _fails(module, rows):
    module.hidden = rows if module.hidden is None else module.hidden + rows


KEEPS = {
    "losses": lambda module, rows: module.losses.append(rows.mean()),
    "mean": lambda module, rows: setattr(module, "mean", rows.mean().item()),
    "rows": lambda module, rows: setattr(module, "rows", module.rows + len(rows)),
    "random": lambda module, rows: setattr(module, "mean", torch.rand(()).item()),
    "total": lambda module, rows: setattr(module, "total", module.total + rows.sum().item()),
    "lengths": lambda module, rows: module.losses.append({"length": len(rows)}),
    "hidden": _hidden,
    "queue": lambda module, rows: setattr(module, "queue", torch.cat([module.queue, rows])[-6:]),
}
TOLD = {
    "lengths": "self.losses",
    "total": "self.total",
    "hidden": "self.hidden",
    "queue": "self.queue",
}


@pytest.mark.parametrize("keeps", KEEPS)
def test_what_does_not_join_is_named(keeps):
    module = Plain()

    def step(rows, seed):
        torch.manual_seed(seed)
        KEEPS[keeps](module, rows)

    text = joins_differ(module, step, torch.arange(8.0), [2, 2, 2, 2])
    assert TOLD.get(keeps, "None") in str(text)
    assert module.total == module.rows == 0
    assert module.losses == []


def test_what_the_next_batch_fails_with_is_refused():
    """The hidden state of two layers, joined along dimension 0, is one of four."""
    module = Plain()
    with pytest.raises(
        UnsupportedError, match=r"keeps in self.hidden .*microbatches fail with it .*num_microbatches=1"
    ):
        joins_differ(module, lambda rows, seed: _fails(module, rows), torch.arange(8.0), [2, 2, 2, 2])
