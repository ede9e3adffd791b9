"""The command line takes the default single file, and says what else it is given."""

import argparse

import pytest
import torch

from lightning_3d.checkpoint.full_files import consolidate, export
from lightning_3d.errors import CheckpointError
from lightning_3d.tools.commands import export as export_command
from tests.checkpoint.trainings import train
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
