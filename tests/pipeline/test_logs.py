"""What a module logs under a real Trainer: the same on every rank as on one process."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.nn import functional as F
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from tests.pipeline.trainer import fit
from tests.pipeline.zoo import MLP, vectors
from tests.workers import run


class Logging(MLP):
    """Logs in every way that users do."""

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


def close(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value == pytest.approx(other[name], abs=1e-5), name


def fitted(strategy, options, pipeline):
    return fit(build, strategy, options, **pipeline)


@pytest.mark.parametrize(("accumulate", "microbatches"), [(1, 4), (3, 3)])
def test_logs_as_on_one_process(accumulate, microbatches):
    options = {"accumulate_grad_batches": accumulate}
    (reference,) = run(fitted, False, options, {}, world=1)
    results = run(fitted, True, options, {"num_microbatches": microbatches}, world=2, group=True)
    for result in results:
        # AUROC and F1 logged as batch values are means of the microbatches' values; everything else is exact.
        inexact = {"train/f1", "train/auroc"}
        for mine, theirs in zip(
            [*result["steps"], result["end"]], [*reference["steps"], reference["end"]], strict=True
        ):
            assert mine.keys() == theirs.keys()
            close(
                {k: v for k, v in mine.items() if k not in inexact},
                {k: v for k, v in theirs.items() if k not in inexact},
            )
        for name, value in result["weights"].items():
            torch.testing.assert_close(value, reference["weights"][name], rtol=0, atol=1e-5)
    assert results[0]["end"] == results[1]["end"]


class Boring(LightningModule):
    """One linear: nothing to cut."""

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

    def forward_predict(self):
        """Makes `fit` of these tests predict too."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def build_boring():
    torch.manual_seed(1)
    return Boring(), [vectors(1, 0), vectors(1, 1)]


def fitted_boring(strategy):
    return fit(build_boring, strategy)


def test_a_module_with_one_layer_leaves_a_stage_empty():
    (reference,) = run(fitted_boring, False, world=1)
    for result in run(fitted_boring, True, world=2, group=True):
        close(result["end"], reference["end"])
        for name, value in result["weights"].items():
            torch.testing.assert_close(value, reference["weights"][name], rtol=0, atol=1e-6)
        for mine, theirs in zip(result["predictions"], reference["predictions"], strict=True):
            torch.testing.assert_close(mine, theirs)
