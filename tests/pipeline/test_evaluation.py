"""Validation, test and predict over stages: the numbers of one device, with blocks on microbatches where that is right."""

import copy
import math
import os
import time
from functools import partial

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from lightning_3d import Strategy3D
from lightning_3d.pipeline.evaluation import StagedPass
from tests.parity import QUIET, caught_warnings, long, refused_by_both
from tests.workers import WorkerError, run
from tests.zoo.batchless import vectors


class Meter:
    """An object of the user's own class."""

    def __init__(self):
        self.total, self.count = 0.0, 0

    def update(self, value, count):
        self.total, self.count = self.total + value * count, self.count + count


class Block(nn.Module):
    rows = 0
    """Rows that blocks of this process have run on."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x):
        Block.rows += len(x)
        return x + self.layer(x).tanh()


class Net(LightningModule):
    """Evaluates in every way that users do."""

    block = Block

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(6, 3)
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.several = MetricCollection({"f1": MulticlassF1Score(3), "auroc": MulticlassAUROC(3)})
        self.mean = MeanMetric()
        self.meter, self.kept = Meter(), []

    def features(self, x):
        hidden = [x]
        for block in self.blocks:
            hidden.append(block(hidden[-1]))
        return hidden

    def forward(self, x):
        return self.head(self.features(x)[-1])

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch["x"]), batch["y"])

    def evaluate(self, batch, name):
        hidden = self.features(batch["x"])
        logits, y = self.head(hidden[-1]), batch["y"]
        loss = F.cross_entropy(logits, y)
        self.log(f"{name}_loss", loss, on_step=True, on_epoch=True)
        self.log(f"{name}_early", hidden[2].square().mean())
        keep = y > 0
        self.log(f"{name}_kept", F.cross_entropy(logits[keep], y[keep]), batch_size=int(keep.sum()))
        self.log(f"{name}_samples", float(len(y)), reduce_fx="sum")
        self.log(f"{name}_largest", logits.max(), reduce_fx="max")
        self.accuracy.update(logits, y)
        self.log(f"{name}_accuracy", self.accuracy)
        self.log_dict(self.several(logits.softmax(1), y), on_step=False, on_epoch=True)
        self.log(f"{name}_f1_of_batch", MulticlassF1Score(3)(logits, y))
        self.mean.update(loss, len(y))
        self.log(f"{name}_mean", self.mean)
        self.meter.update(loss.item(), len(y))
        self.kept += [logits.argmax(1), hidden[1].sum()]
        return {"loss": loss, "logits": logits}

    def validation_step(self, batch, batch_idx):
        output = self.evaluate(batch, "val")
        torch.set_grad_enabled(True)  # which the next batch begins without: geomloss does so
        return output

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        assert type(outputs["logits"]) is torch.Tensor
        assert outputs["logits"].shape == (len(batch["x"]), 3)

    def on_validation_epoch_end(self):
        self.log("meter", self.meter.total / self.meter.count)
        assert all(type(each) is torch.Tensor for each in self.kept)
        self.log("kept", torch.stack([each.float().sum() for each in self.kept]).sum())
        self.meter, self.kept = Meter(), []

    def test_step(self, batch, batch_idx):
        self.evaluate(batch, "test")

    def predict_step(self, batch, batch_idx):
        logits = self(batch["x"])
        return batch["y"], logits, logits.argmax(1).tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watch(Callback):
    """Logs of each validation, and the ways in which the shapes of batches ran."""

    def __init__(self):
        self.logged, self.ways = [], []

    def on_validation_end(self, trainer, module):
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.look(trainer)

    def on_test_end(self, trainer, module):
        self.look(trainer)

    def on_predict_end(self, trainer, module):
        self.look(trainer)

    def look(self, trainer):
        if isinstance(trainer.strategy, Strategy3D):
            self.ways = [type(way).__name__ for way in trainer.strategy._parallel.pipeline.evaluations.shapes.values()]


def batches():
    """Batches of two shapes. The shorter does not divide by the microbatches."""
    return [*(vectors(8, seed) for seed in range(4)), vectors(5, 9)]


def evaluated(make, strategy, how="validate"):
    """On this rank, for three rounds of `batches`: logs or predictions, ways in which the shapes ran, and warnings."""
    seed_everything(7, verbose=False)
    module, watch = make(), Watch()
    chosen = "auto" if strategy is None else Strategy3D(quiet=True, **strategy)
    flags = {"devices": ranks(strategy), "strategy": chosen, "max_epochs": 3, "callbacks": [watch]}
    trainer = Trainer(**{**QUIET, **flags})
    with caught_warnings() as texts:
        if how == "fit":
            trainer.fit(module, DataLoader(batches(), batch_size=None), DataLoader(batches(), batch_size=None))
            found = watch.logged
        else:
            loader = DataLoader(3 * batches(), batch_size=None, collate_fn=copy.deepcopy)
            found = getattr(trainer, how)(module, loader, **({} if how == "predict" else {"verbose": False}))
    return found, watch.ways, [text for text in texts if "one block after the other" in text or "draws random" in text]


def ranks(strategy):
    return math.prod((strategy or {}).get(f"{axis}_parallel_size", 1) for axis in ("pipeline", "data", "tensor"))


TWO = {"pipeline_parallel_size": 2, "num_microbatches": 4}
STAGED, AS_EVER = StagedPass.__name__, "NoneType"


def compare(make, strategy=TWO, how="validate"):
    """Assert that every rank has one device's numbers; the ways of its shapes, and rank 0's warnings."""
    ((wanted, _, _),) = run(evaluated, make, None, how, world=1)
    found = run(evaluated, make, strategy, how, world=ranks(strategy))
    for got, ways, _ in found:
        assert len(got) == len(wanted)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
        assert ways == found[0][1]
    return found[0][1:]


@pytest.mark.parametrize("how", ["validate", "test", "predict", "fit"])
def test_stages_give_the_numbers_of_one_device(how):
    assert compare(Net, how=how) == ([STAGED, STAGED], [])


@pytest.mark.parametrize(
    "strategy",
    [
        TWO | {"schedule": "zbv_zero_bubble"},
        long(TWO | {"tensor_parallel_size": 2}),
        long(TWO | {"schedule": "interleaved_1f1b", "stages_per_rank": 2}),
    ],
)
def test_stages_of_other_layouts(strategy):
    assert compare(Net, strategy) == ([STAGED, STAGED], [])


class CallsItself(Net):
    """A microbatch leaves the module's own forward, which has hooks of FSDP2, before its end."""

    def validation_step(self, batch, batch_idx):
        logits = self(batch["x"])
        self.log("loss", F.cross_entropy(logits, batch["y"]))
        self.meter.update(1.0, len(logits))
        self.kept.append(logits.sum())
        return {"logits": logits}


@pytest.mark.parametrize("stage", [1, long(3)])
def test_training_goes_on_with_its_weights_after_an_evaluation_in_stages(stage):
    assert compare(CallsItself, TWO | {"data_parallel_size": 2, "zero_stage": stage}, "fit") == ([STAGED, STAGED], [])


class WritesIntoItsBatch(Net):
    def validation_step(self, batch, batch_idx):
        batch["x"].mul_(2)
        return super().validation_step({"x": batch.pop("x"), "y": batch["y"]}, batch_idx)

    def on_validation_batch_end(self, outputs, batch, batch_idx):
        assert "x" not in batch


class CallsBlocksAgain(Net):
    """Some batches run the blocks three times, as code that generates samples does."""

    def validation_step(self, batch, batch_idx):
        output = super().validation_step(batch, batch_idx)
        if batch_idx % 5 == 0:
            with torch.no_grad():
                again = self(self(batch["x"]).repeat(1, 2))
            self.log("again", again.square().mean())
        return output


@pytest.mark.parametrize("make", [WritesIntoItsBatch, CallsBlocksAgain])
def test_only_the_blocks_see_microbatches(make):
    assert compare(make) == ([STAGED, STAGED], [])


class UsesTheBatch(Block):
    def forward(self, x):
        return super().forward(x - x.mean(0))


class OfTheBatch(Net):
    block = UsesTheBatch


class MasksAColumn(Block):
    def forward(self, x):
        return torch.cat([super().forward(x)[:, :5], torch.full_like(x[:, :1], -1e9)], dim=1)


class OfTheBatchBehindAMask(OfTheBatch):
    """A tolerance from the largest value would let any difference pass."""

    def __init__(self):
        super().__init__()
        self.blocks[3] = MasksAColumn()
        self.head = nn.Identity()

    def features(self, x):
        *hidden, last = super().features(x)
        return [*hidden, last[:, 3:]]


class KeepsRows(Block):
    cache = None

    def forward(self, x):
        before, self.cache = self.cache, x
        return super().forward(x) + (0 if before is None or len(before) != len(x) else before)


class WithCache(Net):
    block = KeepsRows


class TakesFullBatches(Block):
    def forward(self, x):
        if len(x) < 5:
            raise ValueError("too few rows")
        return super().forward(x)


class OfFullBatches(Net):
    block = TakesFullBatches


class CountsBeforeBlocks(Net):
    """An object of the user's own class changes before the blocks run, which it would do for each microbatch."""

    def validation_step(self, batch, batch_idx):
        self.meter.update(1.0, len(batch["x"]))
        return super().validation_step(batch, batch_idx)


class HasHooks(Net):
    def on_validation_start(self):
        self.rows = []
        self.blocks[1].register_forward_hook(lambda module, args, output: self.rows.append(len(output)))

    def on_validation_epoch_end(self):
        super().on_validation_epoch_end()
        self.log("rows", float(sum(self.rows)))
        self.log("calls", float(len(self.rows)))


class HasHookOnOneRank(Net):
    def on_validation_start(self):
        if self.global_rank == 0:
            self.blocks[0].register_forward_hook(partial(lambda seen, *_: seen.append(0), []))


class GivesABuffer(Block):
    """The buffer needs a gradient, as the loss of a codebook in vector-quantize-pytorch does after training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("zero", torch.zeros(()))

    def forward(self, x):
        return super().forward(x), self.zero


class DifferentiatesOnOneRank(Net):
    def __init__(self):
        super().__init__()
        self.blocks[3], self.head = GivesABuffer(), nn.Identity()

    def on_validation_start(self):
        self.blocks[3].zero.requires_grad_()

    def features(self, x):
        *hidden, (last, zero) = super().features(x)
        return [*hidden, last[:, 3:] + zero]


class FullMemory(Block):
    """A block for which memory suffices on one rank only, once rows are few."""

    def forward(self, x):
        if len(x) < 5 and os.environ["RANK"] == "1":
            raise torch.OutOfMemoryError("no memory left")
        return super().forward(x)


class NoMemoryForAPart(Net):
    block = FullMemory


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (OfTheBatch, "other values for a row"),
        (OfTheBatchBehindAMask, "other values for a row"),
        (WithCache, "keeps 'cache'"),
        (OfFullBatches, "too few rows"),
        long(CountsBeforeBlocks, "Meter keeps"),
        (HasHooks, "forward hooks"),
        (HasHookOnOneRank, "forward hooks"),
        (DifferentiatesOnOneRank, "differentiates them"),
        (NoMemoryForAPart, "no memory left"),
    ],
)
def test_full_batches_where_microbatches_would_differ(make, reason):
    ways, (text,) = compare(make)
    assert ways == [AS_EVER, AS_EVER]
    assert reason in text


class Seeded(Net):
    """Draws behind its blocks, from a seed."""

    seeds = True

    def evaluate(self, batch, name):
        output = super().evaluate(batch, name)
        with torch.random.fork_rng(enabled=self.seeds):
            if self.seeds:
                torch.manual_seed(3)
            self.log("noise", (output["loss"] + torch.randn(8)).exp().mean())
        return output


class Drawing(Seeded):
    seeds = False


def test_a_step_that_draws_is_named_and_a_seed_gives_equal_numbers():
    assert compare(Seeded) == ([STAGED, STAGED], [])
    (text,) = run(evaluated, Drawing, TWO, world=2)[0][2]
    assert "validation_step draws random numbers" in text


class BeginsLater(Block):
    later = False


class UsesTheBatchLater(BeginsLater):
    def forward(self, x):
        return super().forward(x - x.mean(0) if self.later else x)


class DrawsLater(BeginsLater):
    def forward(self, x):
        return super().forward(F.dropout(x, 0.5) if self.later else x)


class Later(LightningModule):
    """Once the stages are proven, blocks compute otherwise. All rows are equal."""

    block = BeginsLater

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(self.block() for _ in range(4)))

    def validation_step(self, batch, batch_idx):
        for block in self.blocks:
            block.later = batch_idx > 2
        self.log("different", float(len(self.blocks(batch).unique(dim=0))), reduce_fx="max")


class OfTheBatchLater(Later):
    block = UsesTheBatchLater


class RandomLater(Later):
    block = DrawsLater


class LogsKeptWeights(Later):
    """Its hook keeps copies of weights, as torch_ema does, and those of another stage have no values."""

    def on_validation_start(self):
        self.kept = [weight.detach().clone() for weight in self.parameters()]

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("kept", sum(weight.norm() for weight in self.kept))


def test_a_log_of_a_kept_weight_of_another_stage_is_refused():
    with pytest.raises(WorkerError, match=r"validation_step reads numbers of a weight .*self.log\('kept', ...\)"):
        run(later, LogsKeptWeights, torch.ones(16, 6), world=2)


def later(make, rows):
    module, strategy = make(), Strategy3D(**TWO, quiet=True)
    trainer = Trainer(**{**QUIET, "devices": 2, "strategy": strategy})
    return trainer.validate(module, DataLoader(rows, batch_size=8), verbose=False)[0]["different"]


def test_random_numbers_that_begin_later_are_other_ones_for_each_row():
    assert run(later, RandomLater, torch.ones(8 * 5, 6), world=2) == [8.0, 8.0]


def test_other_values_in_a_later_batch_are_an_error():
    with pytest.raises(WorkerError, match=r"UnsupportedError: validation_step ran in stages, .* may be wrong"):
        run(later, OfTheBatchLater, torch.randn(8 * 7, 6), world=2)


class Twofold(Net):
    """Logs another result with another loader, and once the sanity check is done."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        hidden = self.features(batch["x"])
        self.log("loss", F.cross_entropy(self.head(hidden[-1]), batch["y"]))
        if self.is_early(batch_idx, dataloader_idx):
            self.log("early", hidden[1].mean())

    def is_early(self, batch_idx, dataloader_idx):
        return dataloader_idx == 1 and not self.trainer.sanity_checking

    on_validation_batch_end = on_validation_epoch_end = lambda *_: None


def with_two_loaders(strategy):
    seed_everything(7, verbose=False)
    flags = {"devices": ranks(strategy), "strategy": Strategy3D(quiet=True, **strategy) if strategy else "auto"}
    trainer = Trainer(**{**QUIET, **flags, "max_epochs": 1, "limit_train_batches": 1, "num_sanity_val_steps": 4})
    loaders = [DataLoader(batches()[:4], batch_size=None) for _ in range(2)]
    trainer.fit(Twofold(), loaders[0], loaders)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_loaders_and_the_sanity_check_are_proven_for_themselves():
    (wanted,) = run(with_two_loaders, None, world=1)
    for got in run(with_two_loaders, TWO, world=2):
        assert got == pytest.approx(wanted, rel=1e-5)


class SkipsABlockLater(Net):
    """Once the stages are proven, one batch runs through other blocks."""

    def validation_step(self, batch, batch_idx):
        self.skips = batch_idx == 10
        return super().validation_step(batch, batch_idx)

    def features(self, x):
        hidden = [x]
        for index, block in enumerate(self.blocks):
            hidden.append(block(hidden[-1]) if index != 2 or not self.skips else hidden[-1])
        return hidden


def test_a_batch_that_runs_otherwise_is_run_on_every_rank_as_ever():
    ways, (text,) = compare(SkipsABlockLater)
    assert ways == [AS_EVER, STAGED]
    assert "which blocks run" in text


class LogsAnEarlyResultLater(Twofold):
    def is_early(self, batch_idx, dataloader_idx):
        return batch_idx == 10


def test_a_result_that_was_not_sent_is_refused_and_the_remedy_works():
    with pytest.raises(WorkerError, match="result of an early block that it did not use in an earlier batch"):
        run(evaluated, LogsAnEarlyResultLater, TWO, world=2)
    compare(LogsAnEarlyResultLater, TWO | {"num_microbatches": 1})


class TrainsHere(Net):
    def validation_step(self, batch, batch_idx):
        with torch.enable_grad():
            self.training_step(batch, batch_idx).backward()


def test_a_validation_that_trains_is_refused_on_every_rank():
    with refused_by_both(r"validation_step calls 'blocks.0' with gradients enabled"):
        run(evaluated, TrainsHere, TWO, world=2)


PAUSE = 0.012


class Sleeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        time.sleep(Clock.pause * len(x))
        return x * self.weight


class Slow(LightningModule):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Sleeps() for _ in range(8))

    def validation_step(self, batch, batch_idx):
        for block in self.blocks:
            batch = block(batch)
        self.log("mean", batch.mean())


class Clock(Callback):
    """The seconds of each batch. Blocks take their time from the third batch on: the runs ahead need not wait."""

    pause = 0.0

    def __init__(self):
        self.times = []

    def on_validation_batch_start(self, trainer, module, batch, batch_idx):
        Clock.pause = PAUSE if batch_idx >= 2 else 0.0
        self.start = time.perf_counter()

    def on_validation_batch_end(self, *_):
        self.times.append(time.perf_counter() - self.start)


def timed():
    clock, strategy = Clock(), Strategy3D(pipeline_parallel_size=2, num_microbatches=16, quiet=True)
    trainer = Trainer(**{**QUIET, "devices": 2, "strategy": strategy, "callbacks": [clock]})
    trainer.validate(Slow(), DataLoader(torch.ones(32 * 3, 3), batch_size=32), verbose=False)
    Clock.pause = 0.0
    return clock.times[2]


def test_two_stages_take_little_more_than_half_the_time():
    """Once in three tries: other work on the machine makes a rank late."""
    one_device = 8 * 32 * PAUSE
    assert any(one_device / max(run(timed, world=2)) >= 0.8 * 2 for _ in range(3))
