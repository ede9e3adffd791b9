"""Errors of steps that a layout cannot run name the remedy that works."""

from lightning.pytorch import Trainer
from torch import nn

from lightning_3d import Strategy3D
from lightning_3d.errors import UnsupportedError
from tests.modules import MLP
from tests.parity import QUIET
from tests.workers import run


class GAN(MLP):
    """Two networks that are not called one after the other."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net, self.critic = nn.Linear(8, 1), nn.Linear(1, 1)


def fit(kind, arguments, strategy):
    trainer = Trainer(**{**QUIET, "devices": 2, "strategy": Strategy3D(quiet=True, **strategy), "max_steps": 2})
    try:
        trainer.fit(kind(*arguments))
    except UnsupportedError as error:
        return str(error)
    return None


def test_a_gan_under_a_pipeline_gets_the_message_about_manual_optimization():
    for text in run(fit, GAN, (), {"pipeline_parallel_size": 2}, world=2):
        assert text is not None
        assert text.startswith("Manual optimization cannot run under a pipeline")
