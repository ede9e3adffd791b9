"""`pytorch_lightning` and `lightning_fabric` mean `lightning.pytorch` and `lightning.fabric` where that is asked for."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from lightning_3d.errors import ConfigurationError
from lightning_3d.launch import served_names
from lightning_3d.launch.served_names import VARIABLE, serve
from tests.parity import long

ROOT = Path(__file__).parents[2]
PACKAGE = """
import os

import pytorch_lightning as pl
import torch
from lightning_fabric import seed_everything
from pytorch_lightning.callbacks.model_checkpoint import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)

class Rows(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        import lightning.pytorch  # of the process that reads, which may be a worker
        assert (pl is lightning.pytorch) == ("LIGHTNING_3D_SERVE_PYTORCH_LIGHTNING" in os.environ)
        return torch.sin(torch.arange(4.0) + index)

class Net(pl.LightningModule):
    def __init__(self, width):
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))

    def training_step(self, batch, index):
        return self.layers(batch).square().mean()

    def on_train_batch_end(self, outputs, batch, index):
        self.losses = [*getattr(self, "losses", []), round(float(outputs["loss"]), 6)]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.5)

def fit(ckpt_path=None, **trainer_kwargs):
    seed_everything(1, verbose=False)
    model = Net(8)
    flags = {"accelerator": "cpu", "max_epochs": 1, "enable_progress_bar": False, "enable_model_summary": False,
             "logger": False, "enable_checkpointing": False}
    trainer = pl.Trainer(**{**flags, **trainer_kwargs})
    trainer.fit(model, DataLoader(Rows(), batch_size=4), ckpt_path=ckpt_path)
    return model.losses, trainer

def alone():
    seed_everything(1, verbose=False)
    model, losses = Net(8), []
    optimizer = model.configure_optimizers()
    for start in range(0, 16, 4):
        loss = model.training_step(torch.stack([Rows()[i] for i in range(start, start + 4)]), 0)
        losses.append(round(float(loss), 6))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses
"""
SCRIPT = """
import sys
import warnings
import package  # before the strategy, as sorted imports may be
from lightning_3d import Strategy3D

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    strategy = Strategy3D(tensor_parallel_size=2, quiet=True, timeout=60)
    losses, trainer = package.fit(devices=2, strategy=strategy)
    assert losses == package.alone(), (losses, package.alone())
    if "spawn" in sys.argv and trainer.is_global_zero:
        assert len([*package.DataLoader(package.Rows(), num_workers=1, multiprocessing_context="spawn")]) == 16
    with open(f"rank-{trainer.global_rank}", "w") as file:  # ranks may write to one line of a pipe
        file.write(f"{sys.argv[1:]} {trainer.world_size}")
"""
SAVES = """
import package
import sys
_, trainer = package.fit()
trainer.save_checkpoint("separate.ckpt")
for path in sys.argv[1:]:
    assert package.Net.load_from_checkpoint(path).hparams == {"width": 8}
    package.fit(max_epochs=2, ckpt_path=path)
"""
CALLS = """
import pickle
import sys
import warnings
from importlib.util import find_spec
import lightning_3d
lightning_3d.serve_pytorch_lightning()
lightning_3d.serve_pytorch_lightning()
import lightning.pytorch
import lightning.fabric.utilities.seed
import package
import lightning_fabric.utilities.seed
import pytorch_lightning.loggers.csv_logs as logs

warnings.simplefilter("ignore")
assert package.pl is lightning.pytorch and sys.modules["lightning_fabric"] is lightning.fabric
assert package.ModelCheckpoint is lightning.pytorch.callbacks.ModelCheckpoint
assert logs is lightning.pytorch.loggers.csv_logs and logs.__name__ == logs.__spec__.name == "lightning.pytorch.loggers.csv_logs"
assert lightning_fabric.utilities.seed is lightning.fabric.utilities.seed
assert find_spec("pytorch_lightning.nothing") is None and find_spec("pytorch_lightning.cli").name == "pytorch_lightning.cli"
named = pickle.loads(b"cpytorch_lightning.utilities.parsing\\nAttributeDict\\n.")
assert named is lightning.pytorch.utilities.AttributeDict
for path in sys.argv[1:]:
    assert package.Net.load_from_checkpoint(path).hparams == {"width": 8}
    losses, trainer = package.fit(strategy="3d_zero1", max_epochs=2, ckpt_path=path)
    assert losses == package.fit(max_epochs=2)[0][4:]
losses, trainer = package.fit(strategy="3d_zero1")
assert type(trainer.strategy) is lightning_3d.Strategy3D
assert losses == package.alone(), (losses, package.alone())
trainer.save_checkpoint("served.ckpt")
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "package.py").write_text(PACKAGE)
    return tmp_path


def python(folder, *arguments, **environment):
    """Run Python there as an installation does, whose `.pth` file lies in a folder of packages."""
    hook = folder / "hook"
    hook.mkdir(exist_ok=True)
    shutil.copy(ROOT / "lightning_3d/launch/served_names.pth", hook)
    (folder / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(hook)!r})\n")
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=170,
        env={**kept, "PYTHONPATH": f"{folder}:{ROOT}", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_one_call_gives_both_names_the_same_modules(folder):
    (folder / "calls.py").write_text(CALLS)
    python(folder, "calls.py")


@pytest.mark.long
def test_checkpoints_of_either_name_load(folder):
    pytest.importorskip("pytorch_lightning", reason="the separate package is not installed")
    for script, text in (("saves.py", SAVES), ("calls.py", CALLS)):
        (folder / script).write_text(text)
    python(folder, "saves.py")
    python(folder, "calls.py", "separate.ckpt")
    python(folder, "saves.py", "served.ckpt")


@pytest.mark.parametrize("argument", ["--lr=1", long("spawn")])
def test_ranks_and_spawned_workers_of_a_script_inherit_the_names(folder, argument):
    (folder / "train.py").write_text(SCRIPT)
    python(folder, "-m", "lightning_3d", "run", "train.py", argument)
    assert [(folder / f"rank-{rank}").read_text() for rank in range(2)] == [f"['{argument}'] 2"] * 2


@pytest.fixture
def _not_served(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(served_names, "distributions", lambda name: [])
    monkeypatch.setenv(VARIABLE, "0")
    for name in [name for name in sys.modules if name.partition(".")[0] in served_names.SERVED]:
        monkeypatch.delitem(sys.modules, name)


@pytest.mark.usefixtures("_not_served")
@pytest.mark.parametrize("name", ["pytorch_lightning", "lightning_fabric"])
def test_a_package_that_was_imported_before_is_refused(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with pytest.raises(ConfigurationError, match=f"`{name}` is imported already.*at the top of the script"):
        serve()
    assert served_names.finder not in sys.meta_path


@pytest.mark.usefixtures("_not_served")
def test_versions_are_compared(monkeypatch):
    monkeypatch.setattr(served_names, "distributions", lambda name: [SimpleNamespace(version="1.9.5")])
    with pytest.raises(ConfigurationError, match=r"pytorch-lightning 1\.9\.5 is installed.*==2\.\d+\.\*, and packages"):
        serve()
    older = {"lightning-fabric": [SimpleNamespace(version="2.0.1")]}
    monkeypatch.setattr(served_names, "distributions", lambda name: older.get(name, []))
    with pytest.warns(UserWarning, match=r"lightning-fabric 2\.0\.1 is installed"):
        serve()
    assert sys.meta_path[0] is served_names.finder


MIXED = """
import warnings
warnings.simplefilter("ignore")
import pytorch_lightning
import lightning_3d
flags = dict(accelerator="cpu", devices=2, logger=False)
for strategy in ("3d_zero1", lightning_3d.Strategy3D()):
    try:
        pytorch_lightning.Trainer(strategy=strategy, **flags)
    except ValueError as error:
        print(error)
try:
    import lightning.pytorch
    trainer = lightning.pytorch.Trainer(strategy="3d_zero1", **flags)
    trainer.fit(pytorch_lightning.LightningModule())
except TypeError as error:
    print(error)
"""


def test_both_mixtures_are_one_line_each():
    """Else `pytorch_lightning` is another class tree than `lightning.pytorch`."""
    pytest.importorskip("pytorch_lightning", reason="the separate package is not installed")
    done = subprocess.run(
        [sys.executable, "-c", MIXED], capture_output=True, text=True, timeout=120, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    by_name, by_object, module = done.stdout.strip().splitlines()
    remedy = "lightning_3d.serve_pytorch_lightning()"  # followed above
    assert remedy in by_name and remedy in by_object
    assert "import Trainer and LightningModule from `lightning.pytorch`" in by_name
    assert "Strategy3D for Trainer of `lightning.pytorch`, not of `pytorch_lightning`" in by_object
    assert "single import style" in module
