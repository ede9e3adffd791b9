"""Every example trains in 3D with one device's losses; its module knows nothing of this package."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader

from tests.parity import in_turn, make_trainer
from tests.workers import run
from tests.zoo.base import Batches

FOLDER = Path(__file__).parents[2] / "examples"
STEPS = 3
SMALL = {"width": 16}
PIPELINE, TENSOR = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}
CASES = [
    ("vision", "VisionTransformer", "Digits", {**SMALL, "layers": 2}, TENSOR),
    ("vision", "VisionTransformer", "Digits", {**SMALL, "layers": 2}, PIPELINE),
    ("vision", "ConvNet", "Digits", {"width": 4}, {"zero_stage": 2}),
    ("hf_finetune", "CausalLM", "Bytes", {**SMALL, "layers": 2}, TENSOR),
    ("hf_finetune", "TextClassifier", "Bytes", {**SMALL, "layers": 2}, {"zero_stage": 3}),
    ("encoder_decoder", "Reverser", "Reversals", SMALL, TENSOR),
    ("encoder_decoder", "Reverser", "Reversals", SMALL, PIPELINE),
    ("contrastive", "Contrastive", "Digits", SMALL, PIPELINE),
]


def losses(name, module, data, arguments, strategy, devices):
    sys.path.insert(0, str(FOLDER))
    example = importlib.import_module(name)
    seed_everything(1, verbose=False)
    made, source = getattr(example, module)(**arguments), getattr(example, data)()
    source.setup("fit")
    tensors = [tensor[: 8 * STEPS] for tensor in source.samples.tensors]
    trainer = make_trainer(devices, strategy, quiet=True, max_epochs=1, sync_batchnorm=strategy is not None)
    ranks = trainer.strategy.layout.data_parallel_size if strategy is not None else 1
    rank = trainer.strategy.coordinate.data if ranks > 1 else 0
    kept = []
    made.on_train_batch_end = lambda *_: kept.append(float(trainer.callback_metrics["loss"]))
    trainer.fit(made, DataLoader(Batches(tensors, 8, rank, ranks), batch_size=None))
    return kept


@pytest.mark.parametrize(
    ("name", "module", "data", "arguments", "strategy"), in_turn(CASES, 2), ids=lambda value: str(value)[:24]
)
def test_an_example_has_the_losses_of_one_device(name, module, data, arguments, strategy):
    (alone,) = run(losses, name, module, data, arguments, None, 1, world=1)
    assert len(alone) == STEPS
    for mine in run(losses, name, module, data, arguments, strategy, 2, world=2):
        torch.testing.assert_close(mine, alone, rtol=1e-4, atol=1e-5)


def mixture(devices, strategy):
    """The losses of the mixture, a mean over data ranks."""
    sys.path.insert(0, str(FOLDER))
    from gpt_from_scratch import StandardLibrary
    from mixture import MixtureGPT

    seed_everything(1, verbose=False)
    made, kept = MixtureGPT(width=16, layers=1, experts=4), []
    made.on_train_batch_end = lambda *_: kept.append(float(made.trainer.callback_metrics["loss"]))
    trainer = make_trainer(devices, strategy, quiet=True, max_steps=STEPS)
    trainer.fit(made, datamodule=StandardLibrary(context=16, limit=20_000))
    return kept


def test_data_ranks_share_the_experts_of_the_mixture():
    (alone,) = run(mixture, 1, None, world=1)
    for mine in run(mixture, 2, {"expert_parallel_size": 2}, world=2):
        torch.testing.assert_close(mine, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_modules_do_not_know_this_package(file):
    if file.stem in ("demo", "forecast", "timetable"):
        return
    before = file.read_text().partition("def main()")[0].partition("def run(")[0]
    assert "lightning_3d" not in before.replace("--", "")


def test_the_picture_of_a_run_is_drawn_by_its_command(tmp_path):
    pytest.importorskip("matplotlib")
    command = [sys.executable, str(FOLDER / "timetable.py"), str(tmp_path / "timetable.png")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()[:1].isdigit() and line.count("%") == 2]
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert (tmp_path / "timetable.png").read_bytes().startswith(b"\x89PNG")
