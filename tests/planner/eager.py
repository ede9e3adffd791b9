"""A user's module that makes a Trainer by a strategy's name when it is imported."""

from lightning.pytorch import Trainer

from tests.zoo.planned import TinyGPT

TRAINER = Trainer(strategy="3d_zero1", accelerator="cpu", devices=1, logger=False)


class Eager(TinyGPT):
    pass
