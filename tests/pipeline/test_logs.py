"""What a module logs under a real Trainer: the same on every rank as on one process."""

import re
from functools import partial

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MetricCollection, MetricTracker, SumMetric
from torchmetrics.aggregation import RunningMean
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from lightning_3d.sandbox.log_recorder import LogRecorder
from lightning_3d.sandbox.record import Record, _logged_once
from tests.parity import assert_same_fit, caught_warnings, fit
from tests.workers import run
from tests.zoo.batchless import MLP, vectors


class Logging(MLP):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.several = MetricCollection({"f1": MulticlassF1Score(3), "auroc": MulticlassAUROC(3)}, prefix="train/")
        self.mean = MeanMetric()
        self.seen = []

    def training_step(self, batch, batch_idx):
        logits = self(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"double": 2 * loss, "index": batch_idx}, batch_size=len(batch["x"]))
        self.log(
            "correct", (logits.argmax(1) == batch["y"]).float().sum(), reduce_fx="sum", on_step=False, on_epoch=True
        )
        self.log("extreme", logits.max(), reduce_fx="max", on_step=False, on_epoch=True)
        self.accuracy(logits, batch["y"])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict(self.several(logits.softmax(1), batch["y"]), on_step=False, on_epoch=True)
        self.mean.update(loss.detach(), len(batch["x"]))
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return {"loss": loss, "logits": logits.detach(), "names": batch["names"]}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert outputs["logits"].shape == (len(batch["x"]), 3)
        assert outputs["names"] == batch["names"]

    def validation_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch["x"]), batch["y"])
        self.log("val_loss", loss)
        self.seen.append(loss.item())

    def on_validation_epoch_end(self):
        self.log("val_mean", torch.tensor(self.seen).mean())
        self.seen.clear()


def build():
    torch.manual_seed(1)
    # The last batch is short, and does not divide by the microbatches.
    return Logging(), [vectors(8, 0), vectors(8, 1), vectors(5, 2)]


TWICE = {"max_epochs": 2, "limit_val_batches": 1.0, "val_check_interval": 1.0}
"""Epochs with a validation over all batches after each."""


def fitted(make, microbatches=None, **flags):
    """On one device without `microbatches`, else over two stages; also what the module has seen."""
    module, batches = make()
    strategy = microbatches and {"pipeline_parallel_size": 2, "num_microbatches": microbatches}
    return fit(lambda: (module, batches), strategy, validate=True, **TWICE, **flags), getattr(module, "seen", None)


def with_flags(make, microbatches, flags):
    return fitted(make, microbatches, **flags)


@pytest.mark.parametrize(("accumulate", "microbatches"), [(1, 4), (3, 3)])
def test_logs_as_on_one_process(accumulate, microbatches):
    flags = {"accumulate_grad_batches": accumulate}
    ((wanted, _),) = run(with_flags, build, None, flags, world=1)
    (one, _), (other, _) = run(with_flags, build, microbatches, flags, world=2)
    assert_same_fit(one, wanted)
    assert_same_fit(other, wanted)
    assert one["logged"][-1] == other["logged"][-1]


class Roots(MLP):
    """Logs numbers that are no means over samples. With `late` a hook computes one from what the step returns."""

    late = False

    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.total, self.right = SumMetric(), SumMetric()

    def training_step(self, batch, batch_idx):
        logits = self(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        self.right.update((logits.argmax(1) == batch["y"]).sum())
        self.log_dict({"loss": loss, "accuracy": self.accuracy(logits, batch["y"]), "index": batch_idx})
        if not self.late:
            self.log("rmse", loss.detach().sqrt())
            self.log("least", loss, reduce_fx=torch.min, on_step=False, on_epoch=True)
            self.log("count", float(len(batch["x"])))
            self.log("late", batch_idx, reduce_fx="sum")  # 0 in the first step
            self.total.update(loss.detach())
        return {"loss": loss, "logits": logits.detach()}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.late:
            self.log("rmse", F.cross_entropy(outputs["logits"], batch["y"]).sqrt())


def said(late, microbatches):
    torch.manual_seed(1)
    module = Roots()
    module.late = late
    with caught_warnings() as texts:
        found, _ = fitted(lambda: (module, [vectors(8, 0), vectors(8, 1)]), microbatches)
    return found, " ".join(texts)


def test_numbers_that_are_logged_otherwise_are_said():
    text = run(said, False, 4, world=2)[0][1]
    named = re.search("logs numbers that are no mean over samples: (.*) by their parts", text)
    assert {*re.findall(r"'(\w+)'", named[1])} == {"rmse", "least", "count", "late", "total"}
    assert "code compares a number of its samples" not in text  # torchmetrics does
    for late, microbatches in ((True, 4), (False, 1)):
        ((wanted, _),) = run(said, late, None, world=1)
        found, text = run(said, late, microbatches, world=2)[0]
        assert "no mean over samples" not in text
        assert_same_fit(found, wanted)


class Boring(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 2)
        self.calls = 0
        self.losses = []

    def training_step(self, batch, batch_idx):
        self.calls += 1
        loss = self.layer(batch["x"]).square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", self.layer(batch["x"]).sum())

    def predict_step(self, batch, batch_idx):
        return self.layer(batch["x"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def predicted(microbatches):
    torch.manual_seed(1)
    module, batches = Boring(), [vectors(1, 0), vectors(1, 1)]
    result, _ = fitted(lambda: (module, batches), microbatches)
    return result, module.trainer.predict(module, DataLoader(batches, batch_size=None))


def test_a_module_with_one_layer_leaves_a_stage_empty():
    ((wanted, predictions),) = run(predicted, None, world=1)
    for result, mine in run(predicted, 1, world=2):
        assert_same_fit(result, wanted)
        torch.testing.assert_close(mine, predictions)


class Uneven(MLP):
    """What is logged and measured is no mean over samples: tokens, masks, counts, extremes, states, some batches only."""

    def __init__(self):
        super().__init__()
        self.tokens = MulticlassAccuracy(3, average="micro")
        self.masked = MulticlassF1Score(3, average="macro")
        self.left = MulticlassAccuracy(3, average="micro")
        self.right, self.largest, self.every = SumMetric(), MaxMetric(), CatMetric()
        self.lately, self.mean = RunningMean(window=2), MeanMetric()
        self.state, self.fresh = SumMetric(), SumMetric()
        self.several = MetricCollection({"f1": MulticlassF1Score(3, average="macro"), "auroc": MulticlassAUROC(3)})
        self.parts = MetricCollection({"one": SumMetric(), "two": SumMetric()})
        self.total = self.right + self.state
        self.plain = {"list": [SumMetric()], "set": {MaxMetric()}}
        self.seen = []

    def training_step(self, batch, batch_idx):
        logits = self(batch["x"])
        y, rest = batch["y"], {"on_step": True, "on_epoch": True}
        loss = F.cross_entropy(logits, y)
        tokens, labels = logits.unsqueeze(1).expand(-1, 2, -1).flatten(0, 1), torch.stack([y, 1 - y % 2], 1).flatten()
        self.tokens(tokens, labels)
        self.log("tokens", self.tokens, **rest)
        keep = y > 0
        some = (torch.arange(len(labels)) % 2 == 0) | (labels > 0)
        self.log("masked", self.masked(tokens[some], labels[some]), on_step=True)
        self.left.update(logits[keep], y[keep])  # which may be none of a microbatch
        if keep.any():
            self.log("kept", F.cross_entropy(logits[keep], y[keep]), batch_size=int(keep.sum()), **rest)
            self.right.update(keep.sum())
        for label in range(3):
            if (y == label).any():
                self.log(f"of_{label}", logits[y == label].max(), reduce_fx="max", **rest)
        self.largest.update(logits.max())
        self.every.update(logits[keep].sum(1))
        self.lately(loss.detach())
        self.mean(loss.detach())
        self.log("lately", self.lately, **rest)
        self.log("mean", self.mean, **rest)
        self.state.update(logits.detach().square().sum())
        self.log("state", self.state.compute())
        self.fresh.reset()
        self.fresh.update(keep.sum())
        self.log("fresh", self.fresh.compute())
        self.several.update(logits.softmax(1), y)
        self.log_dict(self.several.compute())
        self.parts["one"].update(float(len(y)))
        self.parts["two"].update(logits.abs().sum())
        self.plain["list"][0].update(len(y))
        for metric in self.plain["set"]:
            metric.update(y.max())
        self.log("samples", float(len(y)), reduce_fx="sum", **rest)
        return {"loss": loss, "tokens": tokens.detach(), "kept": y[keep]}

    def on_train_epoch_end(self):
        kept = [self.right, self.left, self.largest, self.every, self.state, self.fresh, self.total]
        within = [*self.plain["list"], *self.plain["set"], *self.parts.values()]
        values = [metric.compute() for metric in [*kept, *within]]
        self.seen.append([torch.as_tensor(value).sort().values.tolist() for value in values])

    def validation_step(self, batch, batch_idx):
        """Nothing to see."""


def build_kind(kind):
    torch.manual_seed(1)
    return kind(), [vectors(8, 0), vectors(8, 1), vectors(5, 2)]


@pytest.mark.parametrize("microbatches", [4, 8])
def test_what_is_no_mean_over_samples_is_as_on_one_process(microbatches):
    ((wanted, values),) = run(fitted, partial(build_kind, Uneven), world=1)
    for result, seen in run(fitted, partial(build_kind, Uneven), microbatches, world=2):
        assert_same_fit(result, wanted)
        torch.testing.assert_close(seen, values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("given", "mean"), [([8, 8], 1.4), ([2, 2], 1.5), ([1, 3], 1.75), ([1, 1], 1.4)])
def test_the_batch_size_of_a_log_weighs_microbatches_unless_it_is_that_of_the_whole_batch(given, mean):
    pieces = [((value,), {"batch_size": size}) for value, size in zip([1.0, 2.0], given, strict=True)]
    (value,), kwargs = _logged_once(pieces, [3, 2])
    assert (value, kwargs) == (pytest.approx(mean), {"batch_size": sum(given)})


class Renewed(MLP):
    def __init__(self):
        super().__init__()
        self.tracker = MetricTracker(MulticlassAccuracy(3, average="micro"))

    def on_train_epoch_start(self):
        self.tracker.increment()
        self.fresh = MulticlassF1Score(3, average="macro")

    def training_step(self, batch, batch_idx):
        logits = self(batch["x"])
        self.tracker.update(logits, batch["y"])
        self.fresh.update(logits, batch["y"])
        return F.cross_entropy(logits, batch["y"])

    def on_train_epoch_end(self):
        self.log_dict({"tracked": self.tracker.compute(), "fresh": self.fresh.compute()})


class WithNumpy(MLP):
    def __init__(self):
        super().__init__()
        self.mean, self.total = MeanMetric(), SumMetric()

    def training_step(self, batch, batch_idx):
        logits = self(batch["x"])
        right = (logits.argmax(1).numpy() == batch["y"].numpy()).astype("float32")
        self.log("right", right.mean(), on_step=True, on_epoch=True)
        self.log("count", right.sum(), reduce_fx="sum", on_step=False, on_epoch=True)
        self.mean(right.mean())
        self.total.update(right)
        return {"loss": F.cross_entropy(logits, batch["y"]), "right": right}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert len(outputs["right"]) == len(batch["x"])

    def on_train_epoch_end(self):
        self.log_dict({"mean": self.mean.compute(), "total": self.total.compute()})


class WithoutGraph(MLP):
    """Logs and updates metrics in inference mode, as training plans of scvi-tools do."""

    def __init__(self):
        super().__init__()
        self.right, self.mean = MulticlassAccuracy(3, average="micro"), MeanMetric()

    def training_step(self, batch, batch_idx):
        logits = self(batch["x"])
        loss = F.cross_entropy(logits, batch["y"])
        self.note(loss, logits, batch["y"])
        return loss

    validation_step = training_step

    @torch.inference_mode()
    def note(self, loss, logits, wanted):
        shifted = loss * 2
        shifted += 1
        self.log("shifted", shifted, on_step=False, on_epoch=True, sync_dist=True)
        self.right(logits, wanted)
        self.log("right", self.right, on_step=True, on_epoch=True)
        self.mean.update(logits.square().mean())

    def on_train_epoch_end(self):
        self.log("mean", self.mean.compute())


@pytest.mark.parametrize("kind", [Renewed, WithNumpy, WithoutGraph])
def test_metrics_made_in_each_epoch_numbers_of_numpy_and_of_inference_mode(kind):
    ((wanted, _),) = run(fitted, partial(build_kind, kind), world=1)
    for result, _ in run(fitted, partial(build_kind, kind), 4, world=2):
        assert_same_fit(result, wanted)


def test_a_value_that_is_computed_after_a_forward_has_what_that_was_given():
    module = LightningModule()
    module.metric = MeanMetric()
    with LogRecorder(module).recording(Record()):
        module.metric(torch.tensor(3.0))
        assert module.metric.compute() == 3.0
