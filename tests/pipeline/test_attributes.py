"""What a step keeps in plain attributes of its module is under a pipeline what it is on one device, on every rank."""

from collections import Counter, deque

import pytest
import torch
from torch.nn import functional as F

from lightning_3d.sandbox.counts import Counts
from lightning_3d.sandbox.snapshot import Attributes, join_changes
from tests.pipeline.trainer import fit
from tests.pipeline.zoo import MLP, vectors
from tests.workers import run


class Keeping(MLP):
    """Keeps what users keep."""

    def __init__(self):
        super().__init__()
        self.losses, self.outputs, self.labels, self.recent = [], [], [], deque(maxlen=2)
        self.steps, self.rows, self.correct, self.average, self.last = 0, 0, 0, 0.0, None
        self.pair, self.lists = [[], {"rows": 0}], ([],)
        self.table = {"of": {"classes": Counter()}, "best": None}
        self.classes = set()
        self.running = torch.zeros(())

    def training_step(self, batch, batch_idx):
        x, y = batch["x"], batch["y"]
        self.steps += 1
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


def build():
    torch.manual_seed(1)
    return Keeping(), [vectors(8, 0), vectors(8, 1), vectors(5, 2)]


def kept(strategy, pipeline):
    made = build()
    result = fit(lambda: made, strategy, **pipeline)
    module = made[0]
    names = ("losses", "outputs", "labels", "recent", "steps", "rows", "correct", "average", "running", "last", "table")
    names += ("pair", "lists")
    return {name: getattr(module, name) for name in (*names, "classes", "began")}, result["steps"]


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
    "options", [{"num_microbatches": 4}, {"num_microbatches": 3}, {"loss_scope": "batch"}], ids=str
)
def test_attributes_as_on_one_device(options):
    (reference,) = run(kept, False, {}, world=1)
    for result in run(kept, True, options, world=2, group=True):
        close(result[0], reference[0])
        close(result[1], reference[1])


class Plain:
    """Stands for a module."""


def test_each_run_begins_as_the_first():
    module = Plain()
    module.notes, module.gone, module.many = [1], 3, list(range(20_000))
    attributes = Attributes(module)
    runs = []
    for index in range(2):
        with attributes.apart() as changes:
            assert vars(module).keys() == {"notes", "gone", "many"}
            module.notes.append(index)
            module.many.append(index)
            del module.gone
            module.new = index
        runs.append(changes)
        assert module.notes == [1]
        assert len(module.many) == 20_000
    attributes.put(join_changes(runs, [2, 2], attributes.before))
    assert module.notes == [1, 0]
    assert module.many[20_000:] == [0]
    assert module.new == 1  # integers that differ are counts
    assert not hasattr(module, "gone")


@pytest.mark.parametrize(
    ("made", "whole"),
    [((1, 1), 1), ((2, 2), 4), ((3, 5), 8), ((0, 1), 1), ((-10, -10), -10)],
)  # fmt: skip
def test_counts_are_added_up_and_batches_counted_once(made, whole):
    """By two microbatches of two rows each."""
    runs = [{("count",): ("set", 10 + number)} for number in made if number]
    sizes = [2] * len(runs)
    assert join_changes(runs, sizes, {"count": (10, None)})["count",] == ("set", 10 + whole)


def _labels(module, labels):
    for label in labels:
        module.seen[label] = module.seen.get(label, 0) + 1


INTEGERS = {
    "set to what all have": (lambda module, rows, at: setattr(module, "n", 2 * at + 7), [7, 9, 11]),
    "set to what it was": (lambda module, rows, at: setattr(module, "n", 2 * at), [0, 2, 4]),
    "rows": (lambda module, rows, at: setattr(module, "n", module.n + len(rows)), [6, 12, 18]),
    "batches": (lambda module, rows, at: setattr(module, "n", module.n + 1), [1, 2, 3]),
    "found in the data": (lambda module, rows, at: setattr(module, "n", module.n + rows.count(1)), [2, 4, 6]),
    "classes": (lambda module, rows, at: _labels(module, rows), [{0: 3, 1: 2, 2: 1}, {0: 6, 1: 4, 2: 2}]),
}


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_are_added_to_or_set(kind):
    """As of the second batch a value that moved by two for each microbatch of two rows tells nothing."""
    step, wanted = INTEGERS[kind]
    module, counts, left = Plain(), Counts(), []
    module.n, module.seen = 0, {}
    for at, _ in enumerate(wanted):
        attributes, runs = Attributes(module, counts), []
        for rows in ([0, 1], [0, 2], [0, 1]):
            with attributes.apart() as changes:
                step(module, rows, at)
            runs.append(changes)
        attributes.put(join_changes(runs, [2, 2, 2], attributes.before, counts))
        assert type(module.n) is int
        left.append(dict(sorted(module.seen.items())) or module.n)
    assert left == wanted


def test_tables_of_counts_are_added_up():
    before, made = torch.tensor([[4, 0], [1, 2]]), [torch.tensor([[5, 0], [1, 3]]), torch.tensor([[4, 2], [1, 2]])]
    runs = [{("table",): ("set", table)} for table in made]
    _, joined = join_changes(runs, [3, 3], {"table": (before, None)})["table",]
    assert joined.tolist() == [[5, 2], [1, 3]]
