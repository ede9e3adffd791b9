"""Trainings that tell which samples they were given; run by the workers of `tests/workers.py`."""

import random

import numpy
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_3d import Strategy3D
from tests.checkpoint.trainings import SaveAt
from tests.parity import QUIET
from tests.pipeline.test_streams import Stateful

SAMPLES, BATCH = 60, 4


class RemoteNumbers(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return torch.tensor(float(index))


class Augmented(RemoteNumbers):
    """With random changes that are made where the sample is read."""

    def __getitem__(self, index):
        more = torch.rand(()) + random.random() + numpy.random.rand()
        return super().__getitem__(index) + more / 4


class Own(BatchSampler):
    """A batch sampler of one's own, which draws its order at once."""

    def __iter__(self):
        return iter(torch.randperm(SAMPLES).view(-1, BATCH).tolist())


class Reader(LightningModule):
    """Remembers its samples; its loss depends on them, on dropout and on everything before."""

    loader, workers, estimates, augmented, persistent = "shuffled", 0, False, False, False

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.Dropout(0.5), nn.Linear(16, 1))
        self.given, self.losses = [], []

    def training_step(self, batch, batch_idx):
        batch = torch.cat([part.view(-1) for part in batch]) if isinstance(batch, list) else batch.view(-1)
        self.given.append((self.trainer.current_epoch, batch_idx, batch.int().tolist()))
        loss = (self.net(batch.view(-1, 1) / SAMPLES) - 1).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch, batch_idx):
        self.net(batch.view(-1, 1))

    def configure_optimizers(self):
        if self.estimates:
            assert self.trainer.estimated_stepping_batches > 0  # has Lightning set up the data now
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def val_dataloader(self):
        return DataLoader(RemoteNumbers(), batch_size=30)

    def in_turn(self, data):
        """A sampler of the user's own, where there are several data ranks; it does not shuffle."""
        dealt = self.trainer.distributed_sampler_kwargs
        return DistributedSampler(data, **dealt, shuffle=False) if dealt["num_replicas"] > 1 else None

    def train_dataloader(self):
        data, more = Augmented() if self.augmented else RemoteNumbers(), {"num_workers": self.workers}
        if self.persistent:
            more["persistent_workers"] = True
        if self.loader == "two":
            return [DataLoader(data, BATCH, shuffle=True, **more), DataLoader(range(20), BATCH, shuffle=True, **more)]
        return {
            "shuffled": lambda: DataLoader(data, BATCH, shuffle=True, **more),
            "ordered": lambda: DataLoader(data, BATCH, **more),
            "in turn": lambda: DataLoader(data, BATCH, sampler=self.in_turn(data), **more),
            "generator": lambda: DataLoader(data, BATCH, shuffle=True, generator=torch.Generator(), **more),
            "weighted": lambda: DataLoader(
                data, BATCH, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES), **more
            ),
            "subset": lambda: DataLoader(data, BATCH, sampler=SubsetRandomSampler(range(SAMPLES)), **more),
            "unbatched": lambda: DataLoader(data, batch_size=None, shuffle=True, **more),
            "own": lambda: DataLoader(data, batch_sampler=Own(range(SAMPLES), BATCH, False), **more),
            "stateful": lambda: numbers(100 * self.trainer.strategy.coordinate.data),
            "together": lambda: numbers(0),
        }[self.loader]()


def numbers(start):
    return Stateful([torch.full((BATCH,), float(start + at)) for at in range(10)])


def read(world, strategy, attributes, trainer, stop=None, save=None, resume=None):
    """Train to the end, or save after step `stop` (0: once `fit` has ended) and stop; what was given, and the losses,
    on this rank."""
    seed_everything(7, workers=True, verbose=False)
    module = Reader()
    for key, value in attributes.items():
        setattr(module, key, value)
    flags = {**QUIET, "use_distributed_sampler": True, "limit_val_batches": 0, "max_epochs": 3, **trainer}
    callbacks = [SaveAt(stop, save, True)] if stop else []
    chosen = "auto" if strategy is None else Strategy3D(**strategy)
    fit = Trainer(**flags, devices=world, strategy=chosen, callbacks=callbacks)
    fit.fit(module, ckpt_path=resume)
    if stop == 0:
        torch.rand(3), random.random(), numpy.random.rand()  # a script goes on with the streams
        fit.validate(module, verbose=False)
        fit.save_checkpoint(save)
    return module.given, module.losses


def read_on(world, strategy, attributes, trainer, stop, path, until=None):
    """Once without interruption, once with one after `stop` steps; for 0, saved after a `fit` that ends with `until`."""
    whole = read(world, strategy, attributes, trainer)
    before = read(world, strategy, attributes, until or trainer, stop=stop, save=path)
    return whole, before, read(world, strategy, attributes, trainer, resume=path)
