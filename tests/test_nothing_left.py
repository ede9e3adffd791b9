"""Nothing in torch, Lightning or torchmetrics is replaced by the import, nor after a run, however it ends."""

import io
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_3d import Strategy3D
from tests.parity import QUIET, make_trainer
from tests.workers import on_ranks, run
from tests.zoo import MODULES

FOREIGN = ("torch", "lightning", "torchmetrics", "lightning_utilities")
CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, staticmethod, classmethod, property, type)


def snapshot():
    """Name -> function, method, property or class, in all modules of `FOREIGN` and in their classes."""
    found = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] not in FOREIGN or not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, CODE):
                found[f"{module_name}.{name}"] = value
            if isinstance(value, type) and value.__dict__.get("__module__") == module_name:
                found |= {f"{module_name}.{name}.{own}": each for own, each in list(vars(value).items())}
    return {name: value for name, value in found.items() if isinstance(value, CODE)}


def differences(before, after):
    """Names that were replaced or removed, and names that classes have gained."""
    replaced = [name for name, value in before.items() if after.get(name) is not value]
    classes = {name for name, value in before.items() if isinstance(value, type)}
    return replaced + [name for name in after.keys() - before.keys() if name.rpartition(".")[0] in classes]


THEIRS = """
import sys, types
import torch.distributed.fsdp, torch.distributed.pipelining, torch.distributed.tensor.experimental, torchmetrics
import torch.utils.checkpoint, lightning.pytorch
"""
OURS = """
import lightning_3d
lightning_3d.Strategy3D()
"""


def test_the_import_replaces_nothing():
    this = Path(__file__).read_text()  # imports the package itself, so the process gets only the two functions
    functions = this[this.index("FOREIGN =") : this.index("def test_")]
    code = f"{THEIRS}{functions}\nbefore = snapshot()\n{OURS}\nprint(differences(before, snapshot()))"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Ends(MODULES["GPT"]):
    """Ends the third step by an error, if any: of all ranks at once."""

    def __init__(self, error, where):
        super().__init__()
        self.error, self.where = error, where

    def _end(self, where):
        if self.error is not None and self.where == where and self.trainer.global_step == 2:
            raise self.error("ends")

    def training_step(self, batch, batch_idx):
        self._end("training_step")
        return super().training_step(batch, batch_idx)

    def on_after_backward(self):
        self._end("on_after_backward")


def _fit(strategy, error, where, folder):
    flags = {**QUIET, "enable_checkpointing": True, "default_root_dir": folder, "limit_val_batches": 1, "max_steps": 4}
    keep = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1)
    Trainer(**flags, devices=2, strategy=Strategy3D(timeout=60.0, quiet=True), max_epochs=1).fit(MODULES["MLP"]())
    before = snapshot()  # after a first run, which loads the modules that torch and Lightning import late
    module, handler = Ends(error, where), signal.getsignal(signal.SIGINT)
    trainer = Trainer(**flags, devices=2, strategy=Strategy3D(**strategy, timeout=60.0), callbacks=[keep])
    if error is None:
        trainer.fit(module)
    else:
        with pytest.raises((error, SystemExit)):
            trainer.fit(module)
        signal.signal(signal.SIGINT, handler)  # Lightning ignores the signal from Ctrl-C on
    return differences(before, snapshot())


@pytest.mark.parametrize(
    ("strategy", "error", "where"),
    [
        ({"pipeline_parallel_size": 2}, None, None),
        ({"pipeline_parallel_size": 2}, RuntimeError, "on_after_backward"),  # in a step the other stage would wait
        ({"tensor_parallel_size": 2}, RuntimeError, "training_step"),
        ({"tensor_parallel_size": 2}, KeyboardInterrupt, "training_step"),
        ({"zero_stage": 3}, KeyboardInterrupt, "training_step"),
    ],
)
def test_a_run_leaves_nothing_replaced(strategy, error, where, tmp_path):
    assert run(_fit, strategy, error, where, str(tmp_path), world=2) == [[], []]


@pytest.mark.parametrize("strategy", [{"zero_stage": 3}, {"pipeline_parallel_size": 2}])
@on_ranks(2, group=False)
def test_a_fitted_trainer_and_module_can_be_pickled(strategy):
    module = MODULES["MLP"]()
    trainer = make_trainer(2, {**strategy, "timeout": 60.0}, max_steps=2, max_epochs=1)
    trainer.fit(module)
    file = io.BytesIO()
    torch.save({"trainer": trainer, "module": trainer.model}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for name, tensor in loaded["module"].state_dict().items():
        torch.testing.assert_close(tensor, module.state_dict()[name], rtol=0, atol=0)
    assert (type(loaded["module"]).__name__, loaded["trainer"].global_step) == ("MLP", 2)
