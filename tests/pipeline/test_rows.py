"""Batches are cut along their samples, wherever these are: rows of tensors, entries of lists, insides of objects."""

from collections.abc import MutableMapping
from dataclasses import dataclass

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_3d import Strategy3D
from lightning_3d.errors import UnsupportedError
from lightning_3d.pipeline.microbatch import Rows, auto_microbatches, microbatch_sizes, signature, split_batch
from tests.parity import QUIET, check, make_trainer
from tests.workers import WorkerError, run

NET = nn.Linear(1, 1)


def images(count):
    return tuple(torch.rand(3, 4, 4) for _ in range(count))


def targets(count):
    return tuple({"boxes": torch.rand(index + 1, 4), "label": torch.tensor(index % 2)} for index in range(count))


def cut(batch, expected, sizes):
    rows = Rows.of(batch, expected, NET)
    return rows.count(batch), split_batch(batch, sizes, rows)


@pytest.mark.parametrize("count", [3, 8])
def test_lists_of_images_are_cut_between_images(count):
    """Also where there are as many images as colours."""
    batch = (images(count), targets(count))
    size, (first, second) = cut(batch, count, [2, count - 2])
    assert size == count
    assert [len(part) for part in (*first, *second)] == [2, 2, count - 2, count - 2]
    assert torch.equal(second[0][0], batch[0][2])
    assert second[1][0] is batch[1][2]


def test_a_short_last_batch_is_cut_as_the_first_was():
    rows = Rows.of((images(8), targets(8)), 8, NET)
    last = (images(3), targets(3))
    assert rows.count(last) == 3
    assert [len(piece[0]) for piece in split_batch(last, [2, 1], rows)] == [2, 1]


def test_a_pair_of_tensors_is_no_list_of_two_samples():
    batch = [torch.rand(8, 5), torch.rand(8, 5)]
    size, (first, _) = cut(batch, 8, [4, 4])
    assert size == 8
    assert [part.shape for part in first] == [(4, 5), (4, 5)]


def test_without_a_promise_ragged_lists_are_lists_of_samples():
    batch = {"points": [torch.rand(index + 2, 3) for index in range(6)], "y": torch.rand(6)}
    size, (first, _) = cut(batch, None, [4, 2])
    assert size == 6
    assert len(first["points"]) == 4
    assert first["y"].shape == (4,)


def test_rows_that_are_no_samples_are_refused():
    with pytest.raises(UnsupportedError, match="promises 4 samples in a batch, and the batch seems to have 30 rows"):
        Rows.of({"nodes": torch.rand(30, 5), "edges": torch.rand(2, 71)}, 4, NET)


def test_two_views_of_each_sample_are_rows():
    assert Rows.of(torch.rand(16, 3), 8, NET).count(torch.rand(16, 3)) == 16


def test_modules_that_normalize_over_rows_get_two_at_least():
    rows = Rows.of(torch.rand(8, 3), 8, nn.BatchNorm1d(3))
    assert microbatch_sizes(torch.rand(3, 3), "auto", 2, rows) == [3]
    assert microbatch_sizes(torch.rand(5, 3), "auto", 2, rows) == [3, 2]
    assert auto_microbatches(8, 2, 2) == 4
    assert auto_microbatches(8, 2) == 8


class Graph:
    """A batch of a library: no mapping, no dataclass."""

    def __init__(self, nodes):
        self.x, self.owner = torch.rand(nodes, 4), self


def test_objects_are_opened_for_their_shapes():
    assert signature(Graph(5)) == signature(Graph(5))
    assert signature(Graph(5)) != signature(Graph(6))


class Detector(LightningModule):
    """Images of one size, boxes of any number."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(48, 4)

    def training_step(self, batch, index):
        pictures, found = batch
        boxes = self.head(self.blocks(torch.stack(list(pictures)).flatten(1)))
        wanted = torch.stack([each["boxes"].mean(0) for each in found])
        loss = F.mse_loss(boxes, wanted)
        self.log("loss", loss, batch_size=len(pictures))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def collate(samples):
    return tuple(zip(*samples, strict=True))


def fit(world, most, scope):
    seed_everything(3, verbose=False)
    module = Detector()
    made = torch.Generator().manual_seed(1)
    data = [
        (torch.rand(3, 4, 4, generator=made), {"boxes": torch.rand(index % most + 1, 4, generator=made)})
        for index in range(19)
    ]
    strategy = Strategy3D(pipeline_parallel_size=world, quiet=True, loss_scope=scope) if world > 1 else "auto"
    trainer = Trainer(**{**QUIET, "devices": world, "strategy": strategy, "max_epochs": 2})
    trainer.fit(module, DataLoader(data, batch_size=8, collate_fn=collate))
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(("most", "scope"), [(5, "auto"), (2, "batch"), (1, "batch")])
def test_a_detector_trains_as_on_one_device(most, scope):
    (wanted,) = run(fit, 1, most, scope, world=1)
    for got in run(fit, 2, most, scope, world=2):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


def fit_graphs():
    class Nodes(Detector):
        def training_step(self, batch, index):
            return self.head(self.blocks(batch["nodes"])).square().mean()

    data = [{"nodes": torch.rand(index % 3 + 3, 48)} for index in range(16)]
    trainer = make_trainer(2, {"pipeline_parallel_size": 2}, quiet=True, max_epochs=1)
    together = lambda samples: {"nodes": torch.cat([each["nodes"] for each in samples])}  # noqa: E731
    trainer.fit(Nodes(), DataLoader(data, batch_size=8, collate_fn=together))


def test_a_batch_of_graphs_is_refused_before_training():
    with pytest.raises(WorkerError, match="promises 8 samples in a batch, and the batch seems to have"):
        run(fit_graphs, world=2)


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
