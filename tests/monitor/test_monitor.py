"""`Monitor3D`: its numbers against sleeps and formulas, its warnings against modules with a known fault."""

import copy
import logging
import re
import time
import warnings
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_3d import Monitor3D, Strategy3D
from lightning_3d.errors import ConfigurationError
from lightning_3d.monitor.callback import BatchSize, QuietMonitor, _by_torch, _can_count
from lightning_3d.monitor.step_clock import Spent
from tests.parity import QUIET, build, long, make_trainer
from tests.workers import on_ranks, run
from tests.zoo import MODULES

ROWS, WIDTH = 4, 8


TOOK = {"step": [], "data": [], "optimizer": []}
"""Seconds that each sleep took: on a busy machine, longer than it should."""


def sleep(part, seconds):
    began = time.perf_counter()
    time.sleep(seconds)
    TOOK[part].append(time.perf_counter() - began)


class Rows(Dataset):
    def __init__(self, rows, seconds=0.0):
        self.rows, self.seconds = rows, seconds

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        if index % ROWS == 0:
            sleep("data", self.seconds)
        return torch.full((WIDTH,), index % 5 / 5)


class SlowSGD(torch.optim.SGD):
    seconds = 0.0

    def step(self, closure=None):
        loss = super().step(closure)
        sleep("optimizer", self.seconds)
        return loss


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.spoils = lambda: False

    def forward(self, x):
        x = x + self.outer(torch.tanh(self.inner(x)))
        return x * float("nan") if self.spoils() else x


class Net(LightningModule):
    """Four blocks. `faults` has sleeps, by part, and what goes wrong."""

    def __init__(self, **faults):
        super().__init__()
        self.faults = faults
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def on_fit_start(self):
        rank = self.trainer.global_rank
        if rank == self.faults.get("rank", rank) and "nan" in self.faults:
            block, batch = self.faults["nan"]
            self.blocks[block].spoils = lambda: self.trainer.fit_loop.batch_idx >= batch

    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == self.faults.get("rank", self.trainer.global_rank):
            sleep("step", self.faults.get("step", 0.0))
        loss = self.blocks(batch).pow(2).mean()
        if batch_idx == self.faults.get("jump"):
            loss = loss * 1000
        return loss

    def train_dataloader(self):
        return DataLoader(Rows(ROWS * 200, self.faults.get("data", 0.0)), batch_size=ROWS)

    def configure_optimizers(self):
        optimizer = SlowSGD(self.parameters(), lr=1e-3)
        optimizer.seconds = self.faults.get("optimizer", 0.0)
        return optimizer


class Kept(CSVLogger):
    def __init__(self):
        super().__init__("unused")
        self.kept = {}

    def log_metrics(self, metrics, step=None):
        self.kept.setdefault(step, {}).update(metrics)

    def save(self):
        pass

    def log_hyperparams(self, *args, **kwargs):
        pass


@contextmanager
def heard():
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)


def counts():
    """Operations are counted: other tests leave classes of tensors in the processes that all share."""
    return patch("lightning_3d.monitor.callback._can_count", return_value=True)


def watched(faults, strategy, world, steps=12, every=5, monitor=True, **trainer):
    """Fit; what was logged, warned of and said on this rank."""
    logger = Kept()
    for took in TOOK.values():
        took.clear()
    flags = {"devices": world, "max_steps": steps, "log_every_n_steps": every, "limit_val_batches": 0, **trainer}
    flags |= {"logger": logger, "callbacks": [Monitor3D()] if monitor else []}
    fit = Trainer(**{**QUIET, **flags}, strategy=Strategy3D(**strategy, timeout=60))
    module = Net(**faults)
    with heard() as said, counts(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit.fit(module)
    kinds = [type(callback).__name__ for callback in fit.callbacks]
    hooks = sum(len(each._forward_hooks) for each in module.modules())
    own = [str(w.message) for w in caught if "monitor" in w.filename]
    return {"logged": logger.kept, "warned": own, "said": said, "callbacks": kinds, "hooks": hooks,
            "bar": fit.progress_bar_metrics, "started": vars(fit.profiler).get("start"), "took": TOOK}  # fmt: skip


def last(result):
    step = max(step for step, metrics in result["logged"].items() if "3d/step_seconds" in metrics)
    return {name.removeprefix("3d/"): value for name, value in result["logged"][step].items()}


def summaries(result):
    return [text for text in result["said"] if text.startswith("12 steps, ")]


def test_shares_are_those_of_the_sleeps():
    faults = {"step": 0.1, "data": 0.06, "optimizer": 0.04}
    (result,) = run(watched, faults, {}, 1, 10, world=1)
    found = last(result)
    shares = {name.removeprefix("share/"): value for name, value in found.items() if name.startswith("share/")}
    assert sum(shares.values()) == pytest.approx(1)
    seconds, took = found["step_seconds"], result["took"]
    for name, part in (("compute", "step"), ("data_waiting", "data"), ("optimizer", "optimizer")):
        slept = sum(took[part][-5:]) / 5  # the batches of the last report
        assert 0.99 * slept < shares[name] * seconds < slept + 0.1 * seconds, (name, shares)
    assert found["samples_per_second"] == pytest.approx(ROWS / seconds)


def test_the_monitor_of_the_strategy_sees_the_same():
    (result,) = run(watched, {"step": 0.1, "data": 0.06, "optimizer": 0.04}, {}, 1, 12, 5, False, world=1)
    (line,) = summaries(result)
    percent = {name: int(share) for name, share in re.findall(r"(compute|data waiting|optimizer) (\d+)%", line)}
    took = {part: sum(seconds[-10:]) for part, seconds in result["took"].items()}
    for name, part in (("compute", "step"), ("data waiting", "data"), ("optimizer", "optimizer")):
        assert percent[name] == pytest.approx(100 * took[part] / sum(took.values()), abs=8), line


def test_a_straggler_is_named_once_and_its_peers_wait():
    results = run(watched, {"rank": 1, "step": 0.05}, {"zero_stage": 0}, 2, 60, 5, world=2)
    shares = {name: share for name, share in last(results[0]).items() if name.startswith("share/")}
    assert max(shares, key=shares.get) == "share/data_axis"
    slow = [text for text in results[0]["warned"] if "works" in text]
    assert len(slow) == 1
    assert slow[0].startswith("Rank 1 (")
    assert results[1]["warned"] == []


def test_names_steps_and_what_is_left_after_the_run():
    results = run(watched, {}, {"zero_stage": 1}, 2, world=2)
    names = {"step_seconds", "samples_per_second", "memory_gb", "sent_gb"}
    names |= {f"share/{part}" for part in ("compute", "data_axis", "data_waiting", "optimizer", "other")}
    assert last(results[0]).keys() - {"epoch"} >= names
    assert {step for step, found in results[0]["logged"].items() if "3d/memory_gb" in found} == {4, 9}
    assert "3d/samples_per_second" in results[0]["bar"]
    assert results[1]["logged"] == {}
    (line,) = summaries(results[0])
    assert "samples/s" in line
    assert "MFLOP/s on a device" in line  # in a log once the notes of all ranks have come
    assert all(result["hooks"] == 0 and result["started"] is None for result in results)


def test_a_quiet_monitor_is_added_and_removed():
    (result,) = run(watched, {}, {}, 1, 12, 5, False, world=1)
    assert len(summaries(result)) == 1
    assert not any("3d/" in name for found in result["logged"].values() for name in found)
    assert not any("Monitor" in name for name in result["callbacks"])
    (silent,) = run(watched, {}, {"quiet": True}, 1, 12, 5, False, world=1)
    assert summaries(silent) == []


@on_ranks(1, group=False)
def test_a_later_fit_counts_its_own_steps():
    fit = make_trainer(1, {}, max_steps=5, limit_val_batches=0)
    module = Net()
    with heard() as said:
        fit.fit(module)
        fit.fit_loop.epoch_loop.max_steps = 11
        fit.fit(module)
    assert [text.split(",")[0] for text in said if " each: " in text] == ["5 steps", "6 steps"]


def flops_of(strategy, world):
    monitor = Monitor3D()
    with counts():
        make_trainer(world, strategy, max_steps=4, limit_val_batches=0, callbacks=[monitor]).fit(Net())
    return monitor._flops


@pytest.mark.parametrize("strategy", [{"zero_stage": 3}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_operations_are_those_of_the_formula(strategy):
    one = 2 * ROWS * WIDTH * 2 * WIDTH
    batch = 8 * 3 * one - one  # forward, weights, inputs; the first block needs no gradient of its input
    ranks = 2 if "zero_stage" in strategy else 1
    assert sum(run(flops_of, strategy, 2, world=2)) == ranks * batch


@pytest.mark.parametrize(
    ("strategy", "rank", "block"),
    [({"zero_stage": 1}, 1, 2), ({"pipeline_parallel_size": 2}, 1, 3), ({"tensor_parallel_size": 2}, None, 1)],
)
def test_a_nan_is_found_where_it_began(strategy, rank, block):
    faults = {"nan": (block, 7)} | ({} if rank is None else {"rank": rank})
    results = run(watched, faults, strategy, 2, 22, world=2)
    text = [text for text in results[0]["warned"] if "finite" in text]
    assert len(text) == 1
    assert f"The loss of batch 7 is not a finite number. This began on rank {rank or 0} (" in text[0]
    assert f"in the output of block blocks.{block}." in text[0]
    assert not any("finite" in other for other in results[1]["warned"])


def test_a_nan_of_the_last_batches_is_found_at_the_end():
    (result,) = run(watched, {"nan": (1, 11)}, {}, 1, world=1)
    assert "block blocks.1." in result["warned"][0]


@pytest.mark.parametrize("monitor", [True, False])
def test_a_jump_of_the_loss_and_a_stall_are_named(monitor):
    (result,) = run(watched, {"jump": 30, "data": 0.06}, {}, 1, 40, 1, monitor, world=1, timeout=60)
    jump, stall = sorted(result["warned"], key=lambda text: "data" in text.split("waits")[-1] and "waits" in text)
    assert "in batch 30 on rank 0" in jump
    assert "of the time for its data" in stall


def test_another_strategy_is_refused():
    with pytest.raises(ConfigurationError, match="reads the clocks of Strategy3D"):
        Trainer(**QUIET, devices=1, callbacks=[Monitor3D()], max_steps=1).fit(Net())
    with pytest.raises(ConfigurationError, match="no rate above 0"):
        Monitor3D(peak_tflops=0)


class Copies(Callback):
    """Copies the callbacks of a run, as tools that repeat a run do."""

    def __init__(self):
        self.kinds = []

    def on_train_batch_end(self, trainer, *_):
        self.kinds.append([type(each).__name__ for each in trainer.callbacks])
        copy.deepcopy([each for each in trainer.callbacks if isinstance(each, Monitor3D)])


def callbacks_of_a_run(*monitors):
    copies = Copies()
    make_trainer(2, {}, max_steps=2, limit_val_batches=0, callbacks=[copies, *monitors]).fit(MODULES["MLP"]())
    return copies.kinds


@pytest.mark.parametrize("own", [[], ["Monitor3D"]], ids=["none", "monitor"])
def test_the_callbacks_of_a_run_are_the_user_s_and_can_be_copied(own):
    for kinds in run(callbacks_of_a_run, *(Monitor3D() for _ in own), world=2):
        assert kinds == [["Copies", *own]] * 2


class Fails(Net):
    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            raise ValueError("the user's own")
        return super().training_step(batch, batch_idx)


@on_ranks(1, group=False)
def test_a_batch_that_fails_has_no_end():
    """Its numbers are not complete, and other ranks may not answer any more."""
    with patch.object(QuietMonitor, "on_train_batch_end", autospec=True) as ended:
        try:
            raise KeyError
        except KeyError:
            with pytest.raises(ValueError, match="the user's own"):
                make_trainer(1, {}, max_steps=9, limit_val_batches=0, log_every_n_steps=1).fit(Fails())
    assert ended.call_count == 3


@on_ranks(1, group=False)
def test_a_class_of_tensors_trains_and_leaves_the_operations_uncounted():
    class Labelled(torch.Tensor):
        """Made as pina's are: torch refuses that in a mode which sees each operation."""

        def __new__(cls, tensor):
            return super().__new__(cls, tensor)

    class Labels(Net):
        def training_step(self, batch, batch_idx):
            return super().training_step(Labelled(batch), batch_idx)

    trainer = make_trainer(1, {}, max_steps=9, limit_val_batches=0)
    trainer.fit(Labels())
    assert trainer.global_step == 9


def fullest(world, strategy):
    logger = Kept()
    flags = {"devices": world, "max_steps": 20, "log_every_n_steps": 2, "limit_val_batches": 0, "max_epochs": -1}
    fit = Trainer(**{**QUIET, **flags, "logger": logger, "callbacks": [Monitor3D()]}, strategy=Strategy3D(**strategy))
    fit.fit(build("tests.experts.trained:Lonely"))
    return [metrics["3d/fullest_expert"] for metrics in logger.kept.values() if "3d/fullest_expert" in metrics]


@pytest.mark.parametrize("world", [2, long(4)])
def test_the_share_of_the_fullest_expert_is_logged(world):
    """Each token goes to the first two of four experts."""
    shares, *_ = run(fullest, world, {"expert_parallel_size": 2, "timeout": 60}, world=world)
    assert shares
    assert shares == pytest.approx([0.5] * len(shares))


def test_notes_of_unequal_batches_give_one_share():
    """In each batch the experts of one rank get 5 and 3 rows, the others 3 and 3. Notes are of 2 batches and of 4.

    Operations are the mean of those of a short and a long stage.
    """
    monitor, step = Monitor3D(), Spent(batches=1, seconds=1.0)
    own = {"_size": BatchSize(), "_data_ranks": 2, "_stage_ranks": 2, "_owners": 2, "_times_waits": False}
    own |= {"_device": torch.device("cpu"), "_peak": None}
    vars(monitor).update(own)
    notes = {}
    for rank, (batches, loads) in enumerate([(2, (10, 16)), (4, (12, 24))]):
        monitor._experts = SimpleNamespace(take_loads=lambda loads=loads: {"mixture": loads})
        monitor._flops = rank * 10**12
        notes[rank] = monitor._note(replace(step, batches=batches))
    metrics = monitor._metrics(SimpleNamespace(accumulate_grad_batches=1, world_size=2), step, notes)
    assert metrics["3d/fullest_expert"] == pytest.approx(5 / (5 + 3 + 3 + 3))
    assert metrics["3d/tflops_per_device"] == pytest.approx(0.5)


def test_classes_of_tensors_that_make_themselves_do_not_stop_the_count():
    """Those of torchvision and MONAI; a class that torch would make is refused while it counts."""
    made = type(
        "Made", (torch.Tensor,), {"__new__": lambda kind, value: value.as_subclass(kind), "__module__": "other"}
    )
    plain = type("Plain", (torch.Tensor,), {"__module__": "other"})
    assert not _by_torch(made)
    assert _by_torch(plain)
    assert not _can_count()
