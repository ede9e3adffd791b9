"""Metrics and logged values on every rank are those of one process over the same samples."""

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, seed_everything
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassRecall

from lightning_3d.errors import PeerError, UnsupportedError
from tests.parity import long, make_trainer
from tests.workers import run
from tests.zoo.language import Encoder

LAYOUTS = {
    "data": (2, {"zero_stage": 1}),
    "tensor": (2, {"tensor_parallel_size": 2}),
    "pipeline": (2, {"pipeline_parallel_size": 2}),
    "data-tensor": (4, {"tensor_parallel_size": 2}),
    "data-pipeline": (4, {"pipeline_parallel_size": 2, "zero_stage": 3}),
}


def _kinds():
    several = MetricCollection({"recall": MulticlassRecall(5), "micro": MulticlassAccuracy(5, average="micro")})
    return nn.ModuleDict({"accuracy": MulticlassAccuracy(5), "several": several, "area": BinaryAUROC()})


class Measured(Encoder):
    def __init__(self):
        super().__init__()
        self.kinds = nn.ModuleDict({stage: _kinds() for stage in ("in_train", "in_val")})
        self.count = SumMetric()
        self.plain = {"mean": [MeanMetric()], "seen": SumMetric()}  # no submodules: Lightning does not see them
        self.evaluations = []

    def measure(self, batch, stage):
        x, y = batch
        scores = self.head(self.encoder(x + self.positions).mean(1))
        loss = nn.functional.cross_entropy(scores, y)
        kinds = self.kinds[f"in_{stage}"]
        kinds["accuracy"](scores, y)
        kinds["several"].update(scores, y)
        kinds["area"].update(scores[:, 0].sigmoid(), (y == 0).long())
        shared = {"on_step": False, "on_epoch": True}
        self.log(f"{stage}_accuracy", kinds["accuracy"], **shared)
        self.log_dict({f"{stage}_{name}": metric for name, metric in kinds["several"].items()}, **shared)
        self.log(f"{stage}_area", kinds["area"], **shared)
        total = scores.detach().square().sum()
        for how in ("mean", "sum", "max", "min"):
            value = total if how == "sum" else loss.detach()
            if how in ("max", "min"):
                value = getattr(y, how)().float()
            self.log(f"{stage}_{how}", value, reduce_fx=how, sync_dist=True, **shared)
        return loss

    def training_step(self, batch, batch_idx):
        loss = self.measure(batch, "train")
        self.count.update(len(batch[0]))
        self.log("count", self.count.compute(), on_epoch=False)
        self.plain["seen"].update(batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self.measure(batch, "val")
        self.plain["mean"][0].update(loss.detach(), len(batch[0]))

    def on_train_epoch_end(self):
        self.evaluations.append(float(self.plain["seen"].compute()))

    def on_validation_epoch_end(self):
        self.evaluations.append(float(self.plain["mean"][0].compute()))
        self.plain["mean"][0].reset()


def _fit(strategy, world):
    seed_everything(7, verbose=False)
    module = Measured()
    trainer = make_trainer(world, strategy, max_epochs=2)
    trainer.fit(module)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}, module.evaluations


@pytest.mark.parametrize(
    "layout", [name if name not in ("data-tensor", "data-pipeline") else long(name) for name in LAYOUTS]
)
def test_every_kind_of_metric(layout):
    world, strategy = LAYOUTS[layout]
    ((wanted, evaluations),) = run(_fit, None, 1, world=1)
    assert len(wanted) == 18
    for got, plain in run(_fit, strategy, world, world=world):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(plain, evaluations, rtol=1e-5, atol=1e-5)


class _Counts(Callback):
    """Samples of an epoch, counted by a metric of a callback, and by one that is made during the run."""

    def __init__(self):
        self.own = SumMetric()

    def on_train_start(self, trainer, module):
        self.late = SumMetric()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.own.update(len(batch[0]))
        self.late.update(len(batch[0]))

    def on_train_end(self, trainer, module):
        self.counted = [float(self.own.compute()), float(self.late.compute())]


def _count(strategy, world):
    before, counts = torchmetrics.metric.gather_all_tensors, _Counts()
    make_trainer(world, strategy, max_epochs=1, callbacks=[counts]).fit(Encoder())
    return counts.counted, torchmetrics.metric.gather_all_tensors is before


@pytest.mark.parametrize("layout", ["tensor", "data-pipeline"])
def test_metrics_outside_of_the_module_count_every_sample_once(layout):
    world, strategy = LAYOUTS[layout]
    assert run(_count, strategy, world, world=world) == [([60.0, 60.0], True)] * world


class Measuring(nn.Module):
    """A block that keeps a metric of what it gives, while training or in evaluations too."""

    def __init__(self):
        super().__init__()
        self.layer, self.mean, self.in_train = nn.Linear(16, 16), MeanMetric(), True

    def forward(self, x):
        x = self.layer(x).tanh()
        if self.training == self.in_train:
            self.mean.update(x.detach().mean(), len(x))
        return x


class Inside(Encoder):
    def __init__(self, in_train):
        super().__init__()
        self.encoder = nn.Sequential(*[Measuring() for _ in range(3)])
        for block in self.encoder:
            block.in_train = in_train


def _measure_inside(in_train, strategy, world):
    module = Inside(in_train)
    with pytest.raises((UnsupportedError, PeerError)) as caught:
        make_trainer(world, {**strategy, "timeout": 60.0}, max_epochs=1).fit(module)
    return str(caught.value), module.trainer.global_step


@pytest.mark.parametrize("in_train", [True, long(False)])
def test_a_metric_inside_of_a_block_is_refused_under_a_pipeline(in_train):
    for said, steps in run(_measure_inside, in_train, {"pipeline_parallel_size": 2}, 2, world=2):
        assert "update() of the metric 'encoder.0.mean' is called inside of a block" in said
        assert steps == 0 or not in_train
