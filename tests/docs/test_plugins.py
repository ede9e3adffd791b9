"""The tables of loggers, profilers and plugins in docs/callbacks.md: each is used on two ranks and on one device."""

import importlib.util
import os
import sqlite3
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer, loggers, plugins, profilers, seed_everything
from torch import nn
from torch.nn import functional as F

from lightning_3d import Strategy3D
from lightning_3d.errors import ConfigurationError
from lightning_3d.precision import convert
from tests.docs.test_callbacks import LAYOUTS, table
from tests.parity import QUIET, in_turn
from tests.workers import run
from tests.zoo.plain import MLP, Base

ABSTRACT = {"Logger", "Profiler", "CheckpointIO", "LayerSync"}
"""Base classes, which do nothing by themselves."""
CHANGED = {"LitLogger", "NeptuneLogger"}
"""Came, or went, between Lightning 2.6.0 and 2.6.6."""
WORDS = {"yes", "refused", "not tested"}
PACKAGES = {"Comet": "comet_ml", "MLFlow": "mlflow", "TensorBoard": "tensorboard", "Wandb": "wandb"}
SLOW = ("CometLogger", "MLFlowLogger", "WandbLogger")
ZERO = {"zero_stage": 3}


class Net(Base):
    """Two blocks. Logs in a step and in a hook."""

    samples = 36

    def __init__(self, norm=False):
        super().__init__()
        blocks = [[nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)] for _ in range(2)]
        self.blocks = nn.Sequential(*(nn.Sequential(*block, *[nn.BatchNorm1d(8)] * norm) for block in blocks))
        self.head, self.computed = nn.Linear(8, 1), set()

    tensors = MLP.tensors

    def loss(self, batch):
        result = self.head(self.blocks(batch[0]))
        self.computed.add(str(result.dtype))
        return F.mse_loss(result, batch[1].to(result.dtype))

    def on_train_epoch_end(self):
        self.log("epochs", float(self.current_epoch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fitted(strategy, world, folder, norm=False, **flags):
    seed_everything(7, verbose=False)
    module = Net(norm)
    chosen = Strategy3D(**strategy, quiet=True, timeout=60) if strategy else "auto"
    trainer = Trainer(
        **{**QUIET, "max_epochs": 2, "limit_val_batches": 1, "log_every_n_steps": 1, **flags},
        devices=world, strategy=chosen, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module)
    return module


def words(title):
    """Name -> word, in the table whose first column has that title."""
    return {name: row["works"] for name, row in table(title).items()}


@pytest.mark.parametrize(
    ("title", "package"), [("logger", loggers), ("profiler", profilers), ("plugin", plugins)], ids=lambda x: str(x)[:8]
)
def test_the_tables_are_complete(title, package):
    assert words(title).keys() ^ ({*package.__all__} - ABSTRACT) <= CHANGED
    assert {*words(title).values()} <= WORDS


# ---- loggers -----------------------------------------------------------------------------------------------------


def logger_of(name, folder):
    return {
        "CometLogger": lambda: loggers.CometLogger(offline_directory=folder),
        "CSVLogger": lambda: loggers.CSVLogger(folder),
        "MLFlowLogger": lambda: loggers.MLFlowLogger(tracking_uri=f"sqlite:///{folder}/runs.db"),
        "TensorBoardLogger": lambda: loggers.TensorBoardLogger(folder),
        "WandbLogger": lambda: loggers.WandbLogger(save_dir=folder, offline=True),
    }[name]()


def logged(name, strategy, world, folder):
    """The numbers that the Trainer passed to the logger on this rank, and the files that the logger wrote."""
    own = Path(folder) / os.environ["RANK"]
    own.mkdir(parents=True)
    os.environ["COMET_START_ONLINE"] = "0"
    logger, calls = logger_of(name, str(own)), []
    plain = logger.log_metrics

    def log_metrics(metrics, step=None):
        calls.append({**metrics, "step": step})
        plain(metrics, step)

    logger.log_metrics = log_metrics
    fitted(strategy, world, folder, logger=logger)
    if name == "CometLogger":
        logger.experiment.end()  # else the end of the process writes the file
    return calls, sorted(file.name for file in own.rglob("*") if file.is_file() and not is_empty(file))


def is_empty(file):
    """Lightning opens MLflow's store on every rank, which makes its tables."""
    return file.suffix == ".db" and not sqlite3.connect(file).execute("select 1 from metrics").fetchall()


def logger_cases():
    for name, word in words("logger").items():
        package = PACKAGES.get(name.removesuffix("Logger"), "torch")
        skip = pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"needs {package}")
        for layout in LAYOUTS if word == "yes" else ():
            long = [pytest.mark.long] if name in SLOW or layout != "pipeline" else []
            yield pytest.param(name, layout, marks=[skip, *long])


@pytest.mark.parametrize(("name", "layout"), [*logger_cases()])
def test_a_logger_gets_the_numbers_of_one_device_and_writes_on_rank_0(name, layout, tmp_path):
    new = {"timeout": 180, "fresh": name in SLOW}  # these keep the run of a process open
    ((wanted, _),) = run(logged, name, None, 1, str(tmp_path / "one"), world=1, **new)
    (first, files), (_, none) = run(logged, name, LAYOUTS[layout], 2, str(tmp_path / "two"), world=2, **new)
    assert files
    assert none == []
    assert len(wanted) > 6
    torch.testing.assert_close(first, wanted, rtol=1e-4, atol=1e-5)


# ---- profilers ---------------------------------------------------------------------------------------------------


def profiled(name, strategy, world, folder):
    """The weights, and the number of times that some actions were profiled."""
    own = Path(folder) / os.environ["RANK"]
    own.mkdir(parents=True)
    places = {} if name == "PassThroughProfiler" else {"dirpath": str(own), "filename": "report"}
    profiler, started = getattr(profilers, name)(**places), []
    plain = profiler.start
    profiler.start = lambda action: (started.append(action), plain(action))[1]
    module = fitted(strategy, world, folder, profiler=profiler)
    counts = {action: started.count(action) for action in ("run_training_batch", "[LightningModule]Net.optimizer_step")}
    return dict(module.state_dict()), counts, sorted(file.suffix for file in own.iterdir())


def profiler_cases():
    names = [name for name, word in words("profiler").items() if word == "yes"]
    for layout in LAYOUTS:
        yield from in_turn([(name, layout) for name in names], 2, 0 if layout == "pipeline" else -1)


@pytest.mark.parametrize(("name", "layout"), [*profiler_cases()])
def test_a_profiler_counts_what_it_does_on_one_device_and_reports_on_every_rank(name, layout, tmp_path):
    ((weights, counts, wrote),) = run(profiled, name, None, 1, str(tmp_path / "one"), world=1, timeout=120)
    assert counts["run_training_batch"] == 6
    assert wrote or name == "PassThroughProfiler"
    for mine, same, files in run(profiled, name, LAYOUTS[layout], 2, str(tmp_path / "two"), world=2, timeout=120):
        assert same == counts
        assert {*files} == {*wrote}
        torch.testing.assert_close(mine, weights, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its __del__ needs a complete object
def test_the_profiler_of_other_devices_is_refused_by_lightning():
    refused = [name for name, word in words("profiler").items() if word == "refused"]
    assert refused == ["XLAProfiler"]
    with pytest.raises(ModuleNotFoundError, match="torch_xla"):
        profilers.XLAProfiler()


# ---- plugins -----------------------------------------------------------------------------------------------------

GIVEN = {
    "Precision": (plugins.Precision, 1e-5, "torch.float32"),
    "DoublePrecision": (plugins.DoublePrecision, 1e-12, "torch.float64"),
    "HalfPrecision": (lambda: plugins.HalfPrecision("bf16-true"), 2e-2, "torch.bfloat16"),
    "MixedPrecision": (lambda: plugins.MixedPrecision("bf16-mixed", "cpu"), 5e-3, "torch.bfloat16"),
    "TorchCheckpointIO": (plugins.TorchCheckpointIO, 1e-5, "torch.float32"),
    "AsyncCheckpointIO": (lambda: plugins.AsyncCheckpointIO(plugins.TorchCheckpointIO()), 1e-5, "torch.float32"),
    "TorchSyncBatchNorm": (plugins.TorchSyncBatchNorm, 1e-5, "torch.float32"),
}
"""How a plugin is made, the tolerance, and the numbers that it computes with."""


def plugged(names, strategy, world, folder):
    """For each plugin: the weights, the numbers of the loss, the weights in a checkpoint."""
    found = {}
    for name in names:
        own, saved = f"{folder}/{name}", {"enable_checkpointing": name.endswith("IO")}
        module = fitted(strategy, world, own, "Sync" in name, plugins=[GIVEN[name][0]()], **saved)
        weights = dict(module.state_dict())
        paths = sorted(Path(own).rglob("*.ckpt"))[-1:]  # a thread may write the first after Lightning has removed it
        found[name] = weights, module.computed, [torch.load(path, weights_only=True)["state_dict"] for path in paths]
    return found


def test_the_plugins_do_what_they_do_on_one_device(tmp_path):
    names = [name for name, word in words("plugin").items() if word == "yes"]
    assert {*names} == {*GIVEN}
    (alone,) = run(plugged, names, None, 1, str(tmp_path / "one"), world=1)
    for mine in run(plugged, names, ZERO, 2, str(tmp_path / "two"), world=2):
        for name, (_, tolerance, dtype) in GIVEN.items():
            weights, computed, saved = mine[name]
            wanted, _, files = alone[name]
            close = {"rtol": tolerance, "atol": tolerance}
            torch.testing.assert_close(weights, wanted, **close, msg=lambda text, n=name: f"{n}: {text}")
            assert computed == {dtype}
            assert len(saved) == len(files) == name.endswith("IO")
            for file in saved:
                torch.testing.assert_close(file, weights, rtol=0, atol=0)


def test_plugins_of_other_strategies_and_devices_are_refused():
    for name in [name for name, word in words("plugin").items() if word == "refused"]:
        kind = getattr(plugins, name)
        if name == "XLACheckpointIO":
            with pytest.raises(ModuleNotFoundError, match="torch_xla"):
                kind()
        else:  # made without its arguments and libraries, of which some are for one machine only
            with pytest.raises(ConfigurationError, match=f"does not support the precision plugin {name}"):
                convert(object.__new__(kind))
