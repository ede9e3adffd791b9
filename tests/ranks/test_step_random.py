"""Random streams of a step: their states are read and written once around it, and in no layout that shares one stream."""

from collections import Counter

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from lightning_3d import Strategy3D
from lightning_3d.layout import Layout
from lightning_3d.ranks.random_streams import StepRandom
from tests.parity import QUIET
from tests.workers import run
from tests.zoo import MODULES

FIRST, LAST = 3, 6


class Count(Callback):
    """Reads and writes of the state of torch's stream in some training steps."""

    def __init__(self):
        self.found, self.counting = Counter(), False

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.counting = FIRST <= trainer.global_step < LAST

    def on_train_batch_end(self, *_):
        self.counting = False


def _states(strategy):
    count = Count()

    def counted(name):
        original = getattr(torch, name)

        def call(*args):
            count.found[name] += count.counting
            return original(*args)

        return call

    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("get_rng_state", "set_rng_state"):
            monkeypatch.setattr(torch, name, counted(name))
        flags = {"devices": 2, "max_steps": LAST, "max_epochs": 9, "limit_val_batches": 0, "callbacks": [count]}
        Trainer(**{**QUIET, **flags}, strategy=Strategy3D(**strategy, quiet=True)).fit(MODULES["GPT"]())
    return dict(+count.found)


@pytest.mark.parametrize(
    ("strategy", "times"), [({"zero_stage": 1}, 2), ({"tensor_parallel_size": 2}, 0)], ids=["data", "tensor"]
)
def test_states_are_read_and_written_once_around_a_step(strategy, times):
    wanted = {"get_rng_state": times * (LAST - FIRST), "set_rng_state": times * (LAST - FIRST)} if times else {}
    assert run(_states, strategy, world=2) == [wanted, wanted]


def test_data_ranks_draw_otherwise_in_a_step_and_their_tensor_ranks_alike():
    layout, drawn = Layout(data_parallel_size=2, tensor_parallel_size=2), []
    for rank in range(4):
        with StepRandom(layout, layout.coordinate(rank)).step():
            drawn.append(float(torch.rand(())))
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
