"""Code without a script to run again forks its ranks: at a prompt, in a notebook, in piped code.

Weights of layers that `configure_model` built come back, or a line says how.

A checkpoint of the process that forked would have no steps and no optimizer states: it is refused.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import distributed as dist

from lightning_3d import Strategy3D
from lightning_3d.launch import ScriptLauncher
from tests.parity import make_trainer

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys, warnings
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_3d import Strategy3D
torch.set_num_threads(1)
flags = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)

class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = torch.nn.Linear(4, 1)
            self.register_buffer("first", self.net.weight.detach().clone())

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

model = Net()
if {before}:
    model.configure_model()
trainer = Trainer(accelerator="cpu", devices=2, max_steps=2, strategy=Strategy3D(quiet=True), **flags)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2))
said = [str(each.message) for each in caught if "configure_model() before trainer.fit" in str(each.message)]
learned = model.net is not None and not torch.equal(model.net.weight, model.first)
print("said", len(said), "learned", learned, flush=True)
try:
    trainer.save_checkpoint("state.ckpt")
except Exception as error:
    print(type(error).__name__, "weights_only=True" in str(error), flush=True)
trainer.save_checkpoint("weights.ckpt", weights_only=True)
weights = torch.load("weights.ckpt")["state_dict"]
class Exits(Callback):
    def on_train_batch_end(self, *_):
        sys.exit()
try:
    Trainer(accelerator="cpu", devices=2, strategy=Strategy3D(), callbacks=[Exits()], **flags).fit(model, torch.randn(8, 4))
except Exception as error:
    print(type(error).__name__, "RunError: this rank ended by SystemExit" in str(error), flush=True)
print("same", all(torch.equal(value, weights[name]) for name, value in model.state_dict().items()), flush=True)
"""


@pytest.mark.parametrize(("before", "seen"), [(False, "said 1 learned False"), (True, "said 0 learned True")])
def test_a_module_of_configure_model(tmp_path, before, seen):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("{before}", str(before)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    typed = [sys.executable, "-c", f"exec(open({str(script)!r}).read())"]
    done = subprocess.run(
        typed, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    assert seen in done.stdout, done.stderr[-3000:]
    ends = "UnsupportedError True\nProcessRaisedException True\nsame True"  # steps and states ended with the ranks
    assert ends in done.stdout, done.stdout


TWO = [torch.device("cpu")] * 2


def test_one_process_at_a_prompt_trains_in_it(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    strategy = Strategy3D(cluster_environment=LightningEnvironment(), parallel_devices=TWO[:1])
    strategy._configure_launcher()
    assert isinstance(strategy.launcher, ScriptLauncher)


@pytest.mark.filterwarnings("ignore")
def test_one_process_leaves_the_environment_for_a_later_trainer(monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    before = dict(os.environ)
    make_trainer(1, {}, quiet=True, max_steps=1).fit(BoringModel())
    dist.destroy_process_group()  # other tests of this process start their own
    assert dict(os.environ) == before


@pytest.mark.parametrize("name", ["", "-", "-c"])
def test_what_is_no_script_is_forked(monkeypatch, name):
    import __main__

    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr(__main__, "__spec__", None)
    strategy = Strategy3D(cluster_environment=LightningEnvironment(), parallel_devices=TWO)
    strategy._configure_launcher()
    assert strategy.launcher._start_method == "fork"


def test_a_script_is_run_again(monkeypatch, tmp_path):
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py")])
    strategy = Strategy3D(cluster_environment=LightningEnvironment(), parallel_devices=TWO)
    strategy._configure_launcher()
    assert isinstance(strategy.launcher, ScriptLauncher)
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    strategy._configure_launcher()
    assert not isinstance(strategy.launcher, ScriptLauncher)
