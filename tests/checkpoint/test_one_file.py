"""The command line takes the default single file, and says what else it is given."""

import argparse

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_3d import Strategy3D
from lightning_3d.checkpoint.full_files import consolidate, export
from lightning_3d.errors import CheckpointError
from lightning_3d.tools.commands import export as export_command
from tests.checkpoint.trainings import train
from tests.parity import QUIET
from tests.workers import run


def test_a_single_file_is_exported(tmp_path):
    transformers = pytest.importorskip("transformers")
    path = tmp_path / "x.ckpt"
    (result, _) = run(train, "Llama", 2, {"zero_stage": 3}, 2, None, str(path), world=2)
    assert path.is_file()
    parser = argparse.ArgumentParser()
    export_command.configure(parser)
    assert export_command.run(parser.parse_args([str(path)])) == 0
    model = transformers.LlamaForCausalLM.from_pretrained(f"{path}-export")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, result["weights"][f"model.{name}"])


@pytest.mark.parametrize("command", [consolidate, export])
def test_a_path_that_does_not_exist(tmp_path, command):
    with pytest.raises(CheckpointError, match=r"There is no checkpoint .*nothing\.ckpt"):
        command(tmp_path / "nothing.ckpt", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_is_one_file_already(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "x.ckpt")
    with pytest.raises(CheckpointError, match="is one file already"):
        consolidate(tmp_path / "x.ckpt", tmp_path / "out.ckpt")


def test_weights_are_saved_before_training(tmp_path):
    """Those of a module that is converted, say. Nothing has trained, so step 0 and no states are right."""
    trainer = Trainer(**QUIET, devices=2, strategy=Strategy3D(quiet=True))
    trainer.strategy.connect(BoringModel())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    assert torch.load(tmp_path / "x.ckpt", weights_only=True)["optimizer_states"] == []
