"""Hooks of batches that count: runs ahead of training leave no trace in them."""

import itertools

import pytest
import torch
from lightning.pytorch import LightningDataModule, seed_everything
from torch.utils.data import DataLoader

from tests.parity import Watch, make_trainer, refused_by_both
from tests.workers import run
from tests.zoo.plain import MLP

TENSOR, PIPELINE = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}


class Counts(LightningDataModule):
    hook = "on_after_batch_transfer"

    def __init__(self):
        super().__init__()
        self.seen = 0
        setattr(self, self.hook, lambda batch, _: (batch[0] + self.next(), batch[1]))

    def next(self):
        self.seen += 1
        return self.seen

    def train_dataloader(self):
        return DataLoader([(torch.ones(8, 8) * step, torch.ones(8, 1)) for step in range(3)], batch_size=None)


class CountsBefore(Counts):
    hook = "on_before_batch_transfer"


class Noise:
    def __init__(self):
        self.kept, self.generator = torch.zeros(8, 8), torch.Generator().manual_seed(5)

    def __call__(self):
        return self.kept.add_(torch.rand(8, 8, generator=self.generator))


class Augments(Counts):
    """By an object with a state and a generator; what it returns is its own tensor."""

    def __init__(self):
        super().__init__()
        self.next = Noise()


class Iterates(Counts):
    def __init__(self):
        super().__init__()
        self.numbers = itertools.count()
        self.next = lambda: next(self.numbers)


def losses(kind, world, strategy):
    seed_everything(7, verbose=False)
    watch = Watch()
    trainer = make_trainer(world, strategy, quiet=strategy and True, max_epochs=1, callbacks=[watch])
    data = kind()
    trainer.fit(MLP(), datamodule=data)
    return [*watch.losses, data.seen]


@pytest.mark.parametrize("strategy", [TENSOR, PIPELINE])
@pytest.mark.parametrize("kind", [Counts, CountsBefore, Augments])
def test_what_hooks_of_a_datamodule_count_is_put_back(kind, strategy):
    (wanted,) = run(losses, kind, 1, None, world=1)
    for got in run(losses, kind, 2, strategy, world=2):
        assert got == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("strategy", [TENSOR, PIPELINE])
def test_what_cannot_be_put_back_is_refused(strategy):
    with refused_by_both("in another run on that batch.* in an attribute of the module or datamodule"):
        run(losses, Iterates, 2, strategy, world=2)
