"""Ranks that built other modules are refused on every rank, before training."""

import pytest
import torch
from torch import nn

from lightning_3d.errors import ConfigurationError
from tests.parity import make_trainer
from tests.workers import run
from tests.zoo import MODULES


def _width(module):
    module.odd = nn.Linear(3, 2)


def _name(module):
    module.other = nn.Linear(2, 2)


def _dtype(module):
    module.odd.half()


def _frozen(module):
    module.odd.bias.requires_grad_(False)


def _buffer(module):
    module.register_buffer("counted", torch.zeros(5), persistent=False)


def _tied(module):
    module.twin = module.odd


def _missing(module):
    del module.odd


ODD = {
    _width: ("'odd.weight', float32 [2, 3]", "'odd.weight', float32 [2, 2]"),
    _name: ("'other.weight'", "rank 0: nothing after"),
    _dtype: ("float16", "float32"),
    _frozen: ("'odd.bias', float32 [2], frozen", "'odd.bias', float32 [2], trained"),
    _buffer: ("buffer 'counted', float32 [5]", "nothing after"),
    _tied: ("'twin.weight', float32 [2, 2], trained, tied to 'odd.weight'", "'twin.weight', float32 [2, 2], trained"),
    _missing: ("'twin.weight'", "'odd.weight'"),
}


def _fit(change, settings):
    module = MODULES["MLP"]()
    module.odd, module.twin = nn.Linear(2, 2), nn.Linear(2, 2)
    trainer = make_trainer(2, {**settings, "timeout": 10.0}, quiet=True, max_steps=2, limit_val_batches=0)
    if trainer.global_rank == 1 and change is not None:
        change(module)
    try:
        trainer.fit(module)
    except ConfigurationError as error:
        return str(error)
    return trainer.global_step


@pytest.mark.parametrize("change", ODD, ids=lambda change: change.__name__.strip("_"))
def test_every_rank_names_the_first_difference(change):
    for text in run(_fit, change, {"zero_stage": 0}, world=2):
        assert "rank 1 built another" in text
        there, here = ODD[change]
        zero, one = text.splitlines()[1:3]
        assert there in one
        assert here in zero


@pytest.mark.parametrize("settings", [{"zero_stage": 3}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_in_every_layout(settings):
    for text in run(_fit, _frozen, settings, world=2):
        assert "frozen" in text


def test_equal_modules_train():
    assert run(_fit, None, {"zero_stage": 0}, world=2) == [2, 2]
