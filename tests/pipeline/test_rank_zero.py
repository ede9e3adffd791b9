"""What a step does on rank 0 only, and what it asks of loggers, happens under a pipeline as on one device: there, once."""

import builtins
import re

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only
from torch.nn import functional as F

from lightning_3d import Strategy3D
from tests.parity import QUIET, caught_warnings
from tests.workers import WorkerError, run
from tests.zoo.batchless import MLP, vectors


class Writer:
    def __init__(self):
        self.calls, self.series = [], {}

    def add_scalar(self, name, value, global_step):
        self.calls.append((name, float(value), global_step))

    def add_figure(self, name, figure, note=None):
        self.calls.append((name, type(figure).__name__, note))

    def __getitem__(self, name):
        return self.series.setdefault(name, [])


class Notes(Logger):
    """A logger that keeps what it is given, and is real on rank 0 only."""

    name, version = "notes", 0

    def __init__(self):
        super().__init__()
        self.writer = Writer()

    @property
    @rank_zero_experiment
    def experiment(self):
        return self.writer

    @rank_zero_only
    def log_metrics(self, metrics, step=None):
        self.writer.calls.append(("metrics", sorted(metrics), step))

    @rank_zero_only
    def log_hyperparams(self, *args, **kwargs):
        """Nothing is kept of them."""


class Figure:
    """Neither a tensor nor plain."""


class Telling(MLP):
    def training_step(self, batch, batch_idx):
        if self.trainer.is_global_zero:
            rank_zero_info(f"begins {batch_idx}")
        loss = F.cross_entropy(self(batch["x"]), batch["y"])
        self.print("loss", loss.detach())
        if not isinstance(self.logger, Notes):
            return loss
        self.logger.experiment.add_scalar("item", loss.item(), self.global_step)
        self.logger.experiment.add_scalar("loss", global_step=self.global_step, value=loss)
        self.logger.experiment["series"].append(float(loss))
        self.logger.experiment.add_figure("figure", Figure(), note={"of": self.logger.name})
        self.loggers[0].log_metrics({"own": loss.item()}, step=7)
        if self.trainer.is_global_zero:
            self.logger.experiment.add_scalar("guarded", loss.item(), self.global_step)
            self.messages.append(batch_idx)
        return loss


def fit(kind, strategy, logger, batches=3, **trainer):
    seed_everything(3, verbose=False)
    module, printed = kind(), []
    module.messages = []
    if strategy is not None:
        strategy = Strategy3D(num_microbatches=4, **strategy)
    flags = {**QUIET, "max_epochs": 1, "log_every_n_steps": 1, "limit_val_batches": 0, "logger": logger, **trainer}
    made = Trainer(strategy=strategy or "auto", **flags)
    data = torch.utils.data.DataLoader([vectors(8, seed) for seed in range(batches)], batch_size=None)
    real, builtins.print = builtins.print, lambda *args, **_: printed.append(args)
    try:
        made.fit(module, data)
    finally:
        builtins.print = real
    return printed, module, made


def messages(strategy, devices):
    printed, module, made = fit(Telling, strategy, Notes(), devices=devices)
    printed = [(text, float(value)) for text, value in printed]
    return printed, made.logger.writer.calls, made.logger.writer.series, module.messages


def close(one, other):
    if isinstance(one, float):
        return one == pytest.approx(other, abs=1e-6)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(close, one, other))
    return one == other


@pytest.mark.parametrize(
    ("options", "world"),
    [({"pipeline_parallel_size": 2}, 2), ({"pipeline_parallel_size": 2, "loss_scope": "batch"}, 2), ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, 4)],
    ids=str,
)  # fmt: skip
def test_loggers_and_prints(options, world):
    ((printed, calls, series, _),) = run(messages, None, 1, world=1)
    assert len(printed) == 3
    assert len(calls) == 15
    first, *others = run(messages, options, world, world=world)
    assert close(first[0], printed)
    assert close(first[1], calls)
    assert close(first[2]["series"], series["series"])
    for other in others:
        assert other[:3] == ([], [], {})
    # code for rank 0 ran on one rank, and the ranks of its pipeline know what it kept
    assert [rank[3] for rank in (first, *others) if rank[3]] == [[0, 1, 2], [0, 1, 2]]


class Unsent(MLP):
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch["x"]), batch["y"])
        self.logger.experiment.add_figure("figure", lambda: None)
        return loss


def unsent():
    with caught_warnings() as warned:
        _, _, made = fit(Unsent, {"pipeline_parallel_size": 2}, Notes(), devices=2)
    return warned, made.logger.writer.calls


def test_what_cannot_be_sent_to_rank_0_is_named():
    first, second = run(unsent, world=2)
    assert first[1] == second[1] == []
    assert any("calls 0.experiment.add_figure with something that cannot be sent" in text for text in second[0])


class Where(MLP):
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch["x"]), batch["y"])
        self.where = self.trainer.log_dir
        return loss


def where(folder):
    _, module, made = fit(Where, {"pipeline_parallel_size": 2}, CSVLogger(folder), devices=2)
    return getattr(module, "where", None), made.log_dir


def test_the_folder_of_logs_is_that_of_rank_0(tmp_path):
    (_, folder), (seen, _) = run(where, str(tmp_path), world=2)
    assert seen == folder
    assert re.search("version_0", folder)


class Asking(MLP):
    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch["x"]), batch["y"])
        self.trainer.strategy.broadcast(batch_idx)
        return loss


def asking():
    fit(Asking, {"pipeline_parallel_size": 2}, False, devices=2)


def test_what_other_ranks_would_not_answer_is_refused_on_all():
    with pytest.raises(WorkerError) as error:
        run(asking, world=2, timeout=120)
    assert len(re.findall(r"UnsupportedError: training_step asks for a broadcast of 'int'", str(error.value))) == 2
