"""The table of Lightning's callbacks in docs/callbacks.md: each is run in each layout, and compared with one device."""

import re

import pytest
import torch
from lightning.pytorch import Trainer, callbacks, seed_everything
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn import functional as F

from lightning_3d import Strategy3D
from lightning_3d.errors import UnsupportedError
from tests.docs.pages import ROOT
from tests.parity import QUIET, long
from tests.workers import run
from tests.zoo.plain import MLP, Base

LAYOUTS = {
    "ZeRO 1": {"zero_stage": 1},
    "ZeRO 3": {"zero_stage": 3},
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
}
ABSTRACT = {"Callback", "Checkpoint", "BaseFinetuning", "ProgressBar"}
"""Base classes, which do nothing by themselves."""


class FailsError(Exception):
    """The error of a step, on all ranks."""


class Net(Base):
    """A backbone and a head, whose optimizer has what is trained at first."""

    fails = False

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh())
        self.head, self.lr, self.batch_size = nn.Linear(24, 1), 0.05, 12

    tensors = MLP.tensors

    def forward(self, x):
        return self.head(self.backbone(x))

    def loss(self, batch):
        return F.mse_loss(self(batch[0]), batch[1])

    def on_train_batch_start(self, batch, batch_idx):
        if self.fails and self.trainer.global_step == 3:
            raise FailsError

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def predict_dataloader(self):
        return self._loader()

    def configure_optimizers(self):
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=self.lr)


class Writer(callbacks.BasePredictionWriter):
    def write_on_epoch_end(self, trainer, module, predictions, indices):
        self.total = sum(float(each.sum()) for each in predictions)


def made(name, folder):
    """The callback, with arguments that let it act within three epochs of five batches."""
    own = getattr(callbacks, name)
    arguments = {
        "BackboneFinetuning": {"unfreeze_backbone_at_epoch": 1, "backbone_initial_ratio_lr": 0.5},
        "BatchSizeFinder": {"steps_per_trial": 1, "max_trials": 2, "init_val": 6},
        "DeviceStatsMonitor": {"cpu_stats": True},
        "EarlyStopping": {"monitor": "val_loss", "patience": 1, "min_delta": 10.0},
        "EMAWeightAveraging": {"decay": 0.5},
        "GradientAccumulationScheduler": {"scheduling": {0: 1, 1: 2}},
        "LearningRateFinder": {"num_training_steps": 25, "min_lr": 1e-4, "max_lr": 0.5, "early_stop_threshold": None},
        "ModelCheckpoint": {"dirpath": f"{folder}/best", "monitor": "val_loss", "save_last": True},
        "ModelPruning": {"pruning_fn": "l1_unstructured", "amount": 0.5},
        "OnExceptionCheckpoint": {"dirpath": f"{folder}/failed"},
        "StochasticWeightAveraging": {"swa_lrs": 0.02, "swa_epoch_start": 2},
        "ThroughputMonitor": {"batch_size_fn": lambda batch: len(batch[0]), "window_size": 3},
        "Timer": {"duration": {"hours": 1}},
    }
    return Writer("epoch") if name == "BasePredictionWriter" else own(**arguments.get(name, {}))


def seen(name, strategy, world, folder):
    """What came out of a fit with the callback `name` on this rank. `strategy` may be the name of one of Lightning's."""
    seed_everything(7, verbose=False)
    module, callback = Net(), made(name, folder)
    module.fails = name == "OnExceptionCheckpoint"
    chosen = Strategy3D(**strategy, quiet=True, timeout=60) if isinstance(strategy, dict) else strategy
    flags = {**QUIET, "logger": CSVLogger(folder), "max_epochs": 3, "limit_val_batches": 1, "log_every_n_steps": 1}
    flags |= {"enable_checkpointing": "Checkpoint" in name, "enable_progress_bar": "ProgressBar" in name}
    trainer = Trainer(**flags, devices=world, strategy=chosen, callbacks=[callback], default_root_dir=folder)
    try:
        trainer.fit(module)
    except (UnsupportedError, MisconfigurationException) as error:
        return str(error)
    except FailsError:
        saved = torch.load(f"{folder}/failed/on_exception.ckpt", weights_only=True)
        return {"saved": saved["global_step"], **saved["state_dict"]}
    facts = {"steps": trainer.global_step, "epochs": trainer.current_epoch, "lr": module.lr, "rows": module.batch_size}
    facts |= {name: value.clone() for name, value in module.state_dict().items()}
    if name == "ModelCheckpoint":
        best = torch.load(callback.best_model_path, weights_only=True)
        facts |= {"best": best["global_step"], "score": callback.best_model_score}
    if name == "BasePredictionWriter":
        trainer.predict(module)
        facts["written"] = callback.total
    return facts


def survey(names, strategy, world, folder):
    return {name: seen(name, strategy, world, f"{folder}/{name}") for name in names}


def table(title="callback"):
    """Name -> column -> the word, in the table of docs/callbacks.md whose first column has that title."""
    page = (ROOT / "docs" / "callbacks.md").read_text()
    (text,) = re.findall(rf"^\| {title} \|.*\n(?:\|.*\n)+", page, re.MULTILINE)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    columns = rows[0][1:-1]  # the last one has notes
    return {
        name: dict(zip(columns, words[:-1], strict=True))
        for first, *words in rows[2:]
        for name in re.findall(r"`(\w+)`", first)
    }


def test_the_table_has_every_callback_and_layout():
    rows = table()
    assert rows.keys() == {*callbacks.__all__} - ABSTRACT
    assert all(
        row.keys() == LAYOUTS.keys() and {*row.values()} <= {"yes", "as DDP", "refused"} for row in rows.values()
    )


@pytest.mark.parametrize("layout", ["tensor", *(long(name) for name in LAYOUTS if name != "tensor")])
def test_each_callback_does_what_the_table_says(layout, tmp_path):
    rows = table()
    (wanted,) = run(survey, list(rows), "auto", 1, str(tmp_path / "one"), world=1, timeout=240)
    as_ddp = [name for name, row in rows.items() if row[layout] == "as DDP"]
    wanted |= run(survey, as_ddp, "ddp", 2, str(tmp_path / "ddp"), world=2, timeout=240)[0]
    found = run(survey, list(rows), LAYOUTS[layout], 2, str(tmp_path / "two"), world=2, timeout=240)
    for name, row in rows.items():
        if row[layout] == "refused":
            assert all(isinstance(rank[name], str) for rank in found), name
            continue
        ranks = [rank[name] for rank in found]
        assert not any(isinstance(facts, str) for facts in ranks), ranks
        if "written" in wanted[name] and "ZeRO" in layout:  # each data rank writes its own samples
            total = sum(facts["written"] for facts in ranks)
            ranks = [{**facts, "written": total} for facts in ranks]
        for facts in ranks:
            torch.testing.assert_close(
                facts, wanted[name], rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
            )
