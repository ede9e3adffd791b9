"""What a step writes into tensors and arrays of its module's attributes is under a pipeline what it is on one device."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lightning_3d.sandbox.snapshot import Watched
from tests.parity import fit
from tests.pipeline.test_attributes import close
from tests.workers import run
from tests.zoo.batchless import MLP, vectors

KEPT = ("total", "same", "mean", "confusion", "steps", "table", "array", "counts", "sums", "number", "floats")


class Writing(MLP):
    """Keeps sums in tensors and arrays, and a mean that the loss has."""

    def __init__(self):
        super().__init__()
        self.total, self.mean = torch.zeros(()), torch.ones(3)
        self.same = self.total
        self.confusion, self.steps = torch.zeros(3, 3, dtype=torch.long), torch.zeros((), dtype=torch.long)
        self.table = {"of": {"logits": torch.zeros(3)}}
        self.array, self.counts, self.sums = np.zeros(3), np.zeros(3, dtype=np.int64), np.zeros(3, dtype=np.float32)
        self.number, self.floats = np.float32(0), torch.zeros(3)
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch["x"], batch["y"]
        logits = self(x)
        self.mean.mul_(0.9).add_(0.05)
        loss = F.cross_entropy(logits * self.mean, y)
        self.total += loss.detach()
        self.steps += 1
        for wanted, given in zip(y.tolist(), logits.argmax(1).tolist(), strict=True):
            self.confusion[wanted, given] += 1
            self.floats[wanted] += 1
        self.table["of"]["logits"] += logits.detach().mean(0)
        self.array += logits.detach().mean(0).numpy()
        self.counts = self.counts + np.bincount(y.numpy(), minlength=3)
        self.sums = self.sums + logits.detach().mean(0).numpy()
        self.number = self.number + np.float32(loss.item())
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert self.same is self.total
        self.seen.append(float(self.total))


def build():
    torch.manual_seed(1)
    return Writing(), [vectors(8, 0), vectors(8, 1), vectors(5, 2)]


def kept(microbatches):
    made = build()
    strategy = microbatches and {"pipeline_parallel_size": 2, "num_microbatches": microbatches}
    result = fit(lambda: made, strategy, max_epochs=2)
    values = {name: getattr(made[0], name) for name in (*KEPT, "seen")}
    plain = {name: value if name in ("table", "seen") else torch.as_tensor(value) for name, value in values.items()}
    return plain, result["weights"]


@pytest.mark.parametrize("microbatches", [4, 3])
def test_what_is_written_into_attributes_is_as_on_one_device(microbatches):
    (reference,) = run(kept, None, world=1)
    for result in run(kept, microbatches, world=2):
        close(result[0], reference[0])
        close(result[1], reference[1])


def test_a_registry_with_access_of_its_own_is_compared_without_it():
    """As that of transformers for what its models record."""
    named = type("Named", (dict,), {"get": lambda self, key: dict.get(self, key.name)})(a=[1])
    renaming = type(
        "ByType", (dict,), {"__setitem__": lambda self, key, value: dict.__setitem__(self, type(key), value)}
    )
    watched = Watched(SimpleNamespace(named=named, renaming=renaming(a=[1])))
    assert not watched.changes()
    named["a"].append(2)
    named["b"] = 3
    assert watched.changes() == {("named", "a"): ("append", [2]), ("named", "b"): ("set", 3)}
