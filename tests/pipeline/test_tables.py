"""Batches that cannot be hashed or compared, and mappings that iterate over rows, train and validate in stages."""

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule
from torch import nn

from tests.parity import check


class OnTables(LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))

    def training_step(self, batch, batch_idx):
        loss = (self.blocks(batch.inputs["x"]) - batch.target).square().mean()
        self.log("loss", loss, batch_size=len(batch.inputs))
        return {"loss": loss, "read": batch.inputs}

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Table(MutableMapping):
    """A batch like a TensorDict: it iterates over its rows, cannot be hashed, and all entries have its rows."""

    def __init__(self, entries):
        self.entries = dict(entries)
        self.batch_size = next(iter(self.entries.values())).shape[:1]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert func is torch.cat
        return Table({name: torch.cat([table[name] for table in args[0]]) for name in args[0][0].entries})

    def __getitem__(self, key):
        if isinstance(key, str):
            return self.entries[key]
        return Table({name: tensor[key] for name, tensor in self.entries.items()})

    def __setitem__(self, key, value):
        if value.shape[:1] != self.batch_size:
            raise RuntimeError("batch dimension mismatch")
        self.entries = {**self.entries, key: value}

    def __delitem__(self, key):
        del self.entries[key]

    def __iter__(self):
        return (self[at : at + 1] for at in range(len(self)))

    def __len__(self):
        return self.batch_size[0]

    def __eq__(self, other):
        return Table({name: tensor == other[name] for name, tensor in self.entries.items()})

    def keys(self):
        return self.entries.keys()

    def values(self):
        return self.entries.values()

    def items(self):
        return self.entries.items()


@dataclass
class Labelled:
    inputs: Table
    target: torch.Tensor


def on_tables():
    torch.manual_seed(0)
    rows = [torch.randn(8, 8) for _ in range(7)]
    return OnTables(), [Labelled(Table({"x": x, "length": x[:, 0]}), x.sin()) for x in rows]


def test_a_batch_that_cannot_be_hashed_trains_and_validates_as_on_one_device():
    check(on_tables, 2, {"num_microbatches": 4}, validate=True)
