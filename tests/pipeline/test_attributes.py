"""What a step keeps in plain attributes of its module is under a pipeline what it is on one device, on every rank."""

from collections import Counter, deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from lightning_3d.sandbox.joining import join_changes
from lightning_3d.sandbox.snapshot import Watched, isolated, plain_attributes, put_changes
from tests.parity import caught_warnings, fit
from tests.workers import run
from tests.zoo.batchless import MLP, vectors


class Keeping(MLP):
    def __init__(self):
        super().__init__()
        self.losses, self.outputs, self.labels, self.recent = [], [], [], deque(maxlen=2)
        self.steps, self.rows, self.correct, self.average, self.last, self.indices = 0, 0, 0, 0.0, None, 0
        self.pair, self.lists = [[], {"rows": 0}], ([],)
        self.table = {"of": {"classes": Counter()}, "best": None}
        self.classes = set()
        self.running = torch.zeros(())

    def training_step(self, batch, batch_idx):
        x, y = batch["x"], batch["y"]
        self.steps += 1
        self.indices += batch_idx  # of the first batch 0
        if not hasattr(self, "began"):
            self.began = batch_idx
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.losses.append(loss.detach())
        self.outputs.append({"loss": loss.item(), "logits": logits.detach()})
        self.labels.extend(y.tolist())
        self.pair[0].append(loss.detach())
        self.pair[1]["rows"] += len(x)
        self.lists[0].extend(y.tolist())
        self.recent.append(loss.detach())
        self.rows += len(x)
        self.correct += 10 * int((logits.argmax(1) == y).sum())
        self.average = 0.9 * self.average + 0.1 * loss.item()
        self.running = 0.5 * self.running + loss.detach()
        self.last = logits.detach()
        self.table["best"] = loss.item()
        self.table["of"]["classes"].update(y.tolist())
        self.classes.update(y.tolist())
        self.loss = loss
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert self.steps == self.began + self.trainer.global_step
        assert self.last.shape == (len(batch["x"]), 3)
        self.log("kept", self.losses[-1])
        self.log("average", self.average)


WRITTEN = ("total", "same", "mean", "confusion", "steps", "table", "array", "counts", "sums", "number", "floats")


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


def kept(kind, pipeline):
    torch.manual_seed(1)
    made = kind(), [vectors(8, 0), vectors(8, 1), vectors(5, 2)]
    result = fit(lambda: made, pipeline and {"pipeline_parallel_size": 2, **pipeline}, max_epochs=2)
    if kind is Writing:
        values = {name: getattr(made[0], name) for name in (*WRITTEN, "seen")}
        plain = {name: value if name in ("table", "seen") else torch.as_tensor(value) for name, value in values.items()}
        return plain, result["weights"]
    names = ("losses", "outputs", "labels", "recent", "steps", "rows", "correct", "average", "running", "last", "table")
    return {name: getattr(made[0], name) for name in (*names, "pair", "lists", "classes", "began", "indices")}, result[
        "logged"
    ]


def close(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = list(one.values()), [other[key] for key in one]
    if isinstance(one, list | tuple | deque):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            close(left, right)
    elif isinstance(one, float | torch.Tensor):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=1e-5, atol=1e-5)
    else:
        assert one == other


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((Keeping, each) for each in ({"num_microbatches": 4}, {"num_microbatches": 3}, {"loss_scope": "batch"})),
        *((Writing, {"num_microbatches": count}) for count in (4, 3)),
    ],
)
def test_attributes_as_on_one_device(kind, options):
    (reference,) = run(kept, kind, None, world=1)
    for result in run(kept, kind, options, world=2):
        close(result[0], reference[0])
        close(result[1], reference[1])


class Plain:
    """Stands for a module."""


def apply(module, step, pieces, sizes):
    """Run `step` on each piece as a pipeline does, and put what they make of the attributes together."""
    runs = []
    for piece in pieces:
        with isolated(module) as changes:
            step(module, piece)
        runs.append(changes)
    put_changes(module, join_changes(runs, sizes, plain_attributes(module)))


def test_each_run_begins_as_the_first():
    module = Plain()
    module.notes, module.gone, module.many = [1], 3, list(range(20_000))
    notes = module.notes

    def step(module, index):
        assert vars(module).keys() == {"notes", "gone", "many"}
        assert module.notes == [1]
        assert len(module.many) == 20_000
        module.notes.append(index)
        module.many.append(index)
        del module.gone
        module.new = index

    apply(module, step, [0, 1], [2, 2])
    assert notes is module.notes
    assert module.notes == [1, 1]  # integers that differ are counts
    assert module.many[20_000:] == [1]
    assert module.new == 1
    assert not hasattr(module, "gone")


def test_originals_stay_as_they_are_until_the_end():
    module = Plain()
    module.sum, module.rows, module.list = torch.zeros(2), np.zeros(2), [torch.zeros(2)]
    module.view, module.trained = module.sum[:1], torch.zeros(1, requires_grad=True)
    before, inner = dict(vars(module)), module.list[0]
    with isolated(module) as changes:
        assert module.sum is not before["sum"]
        assert module.trained is before["trained"], "what gradients flow to"
        module.sum += 1
        module.rows += 1
        module.list[0] += 1
    assert all(vars(module)[name] is value for name, value in before.items())
    assert module.sum.tolist() == module.rows.tolist() == inner.tolist() == [0, 0]
    assert set(changes) == {("sum",), ("rows",), ("list", 0)}
    put_changes(module, changes)
    assert module.sum is before["sum"]
    assert module.list[0] is inner
    assert module.sum.tolist() == module.rows.tolist() == inner.tolist() == [1, 1]


def test_a_list_that_contains_itself_is_compared_once():
    """The ring of a cache, and one list at two places."""
    module = Plain()
    module.ring, module.count = [], [0]
    module.ring[:] = [module.ring, module.count]
    with isolated(module) as changes:
        module.ring[1].append(1)
    assert len(changes) == 1
    put_changes(module, changes)
    assert module.count == [0, 1]
    assert module.ring[0] is module.ring


@pytest.mark.parametrize(
    ("made", "whole"),
    [((1, 1), 1), ((2, 2), 4), ((3, 5), 8), ((0, 1), 1), ((-10, -10), -10)],
)  # fmt: skip
def test_counts_are_added_up_and_batches_counted_once(made, whole):
    """By two microbatches of two rows each."""
    runs = [{("count",): ("set", 10 + number)} for number in made if number]
    sizes = [2] * len(runs)
    assert join_changes(runs, sizes, {"count": 10})["count",] == ("set", 10 + whole)


def _labels(module, labels):
    for label in labels:
        module.seen[label] = module.seen.get(label, 0) + 1


INTEGERS = {
    "batches": (lambda module, rows: setattr(module, "n", module.n + 1), [1, 2, 3]),
    "rows": (lambda module, rows: setattr(module, "n", module.n + len(rows)), [6, 12, 18]),
    "rows of this batch": (lambda module, rows: setattr(module, "of_batch", len(rows)), [6, 6, 6]),
    "found in the data": (lambda module, rows: setattr(module, "n", module.n + rows.count(1)), [2, 4, 6]),
    "classes": (lambda module, rows: _labels(module, rows), [{0: 3, 1: 2, 2: 1}, {0: 6, 1: 4, 2: 2}]),
    "words": (lambda module, rows: module.words.update(rows), [{0: 3, 1: 2, 2: 1}, {0: 6, 1: 4, 2: 2}]),
}


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_are_added_up(kind):
    """From the second batch on, a value that grew by two for each microbatch of two rows does not show why."""
    step, wanted = INTEGERS[kind]
    module, left = Plain(), []
    module.n, module.of_batch, module.seen, module.words = 0, None, {}, Counter()
    for _ in wanted:
        apply(module, step, ([0, 1], [0, 2], [0, 1]), [2, 2, 2])
        left.append(dict(sorted((module.seen or module.words).items())) or module.n or module.of_batch)
    assert left == wanted


def test_an_integer_that_is_set_is_named_once_it_falls():
    """It looks like one that is added to while it grows. That of the last microbatch is kept then."""
    module, left = Plain(), []
    module.length = 0
    for length in (7, 9, 4):
        with caught_warnings() as caught:
            apply(module, lambda module, rows, length=length: setattr(module, "length", length), [0, 1], [2, 2])
        left.append((module.length, len(caught)))
    assert left == [(14, 0), (9, 1), (4, 1)]
    assert "the integer self.length to a lower value" in caught[0]


@pytest.mark.parametrize("values", [("a", "b"), (True, False), ([1, "a"], None)], ids=str)
def test_values_that_cannot_be_joined_are_named(values):
    module = Plain()
    with pytest.warns(UserWarning, match=r"leave different values in self.last, which cannot be joined"):
        apply(module, lambda module, value: setattr(module, "last", value), values, [2, 2])
    assert module.last == values[1]


def test_tables_of_counts_are_added_up():
    before, made = torch.tensor([[4, 0], [1, 2]]), [torch.tensor([[5, 0], [1, 3]]), torch.tensor([[4, 2], [1, 2]])]
    runs = [{("table",): ("set", table)} for table in made]
    _, joined = join_changes(runs, [3, 3], {"table": before})["table",]
    assert joined.tolist() == [[5, 2], [1, 3]]


def test_a_registry_with_access_of_its_own_is_compared_without_it():
    """As that of transformers for what its models record."""
    named = type("Named", (dict,), {"get": lambda self, key: dict.get(self, key.name)})(a=[1])
    renaming = type(
        "ByType", (dict,), {"__setitem__": lambda self, key, value: dict.__setitem__(self, type(key), value)}
    )
    built = type("Built", (dict,), {"__init__": lambda self, name, size: dict.__init__(self, name=size)})("x", 2)
    built.__class__.__reduce__ = lambda self: (type(self), (dict(self),))  # as that of torchphysics' spaces
    watched = Watched(SimpleNamespace(named=named, renaming=renaming(a=[1]), built=built))
    assert not watched.changes()
    named["a"].append(2)
    named["b"] = 3
    assert watched.changes() == {("named", "a"): ("append", [2]), ("named", "b"): ("set", 3)}
