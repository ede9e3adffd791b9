"""Checkpoints that Lightning's other strategies have written."""

import re

import pytest
import torch

from lightning_3d.checkpoint.collect import to_numbers
from lightning_3d.checkpoint.full_files import consolidate
from lightning_3d.errors import CheckpointError
from tests.checkpoint.trainings import build, train
from tests.workers import WorkerError, run


def _as_fsdp(path, out):
    """The file that `consolidate_checkpoint` makes of a directory of FSDPStrategy: optimizer states by name."""
    checkpoint, module = torch.load(path, weights_only=False), build("MLP")
    module_names = {parameter: name for name, parameter in module.named_parameters()}
    optimizer = module.configure_optimizers()["optimizer"]
    names = [module_names[p] for group in optimizer.param_groups for p in group["params"]]
    (state,) = checkpoint["optimizer_states"]
    state["state"] = {names[number]: value for number, value in state["state"].items()}
    for group in state["param_groups"]:
        group["params"] = [names[number] for number in reversed(group["params"])]
    torch.save(checkpoint, out)


@pytest.mark.parametrize("strategy", [{"zero_stage": 2}, {"zero_stage": 0, "tensor_parallel_size": 2}])
def test_optimizer_states_by_name_are_loaded(tmp_path, strategy):
    numbered, named = str(tmp_path / "numbered.ckpt"), str(tmp_path / "named.ckpt")
    run(train, "MLP", 1, None, 2, None, numbered, world=1)
    _as_fsdp(numbered, named)
    (expected, _) = run(train, "MLP", 2, strategy, 4, numbered, world=2)
    (result, _) = run(train, "MLP", 2, strategy, 4, named, world=2)
    assert result["losses"] == expected["losses"]
    for name, weight in expected["weights"].items():
        assert torch.equal(result["weights"][name], weight)
    assert result["optimizers"][0]["state"].keys() == expected["optimizers"][0]["state"].keys()


@pytest.mark.parametrize(
    ("file", "remedy"),
    [(".metadata", "consolidate_checkpoint"), ("zero_to_fp32.py", "convert_zero_checkpoint_to_fp32")],
)
def test_a_directory_of_another_strategy_is_named(tmp_path, file, remedy):
    (tmp_path / file).write_text("")
    with pytest.raises(WorkerError, match=remedy):
        run(train, "MLP", 2, {"zero_stage": 2}, 4, str(tmp_path), world=2)
    with pytest.raises(CheckpointError, match=remedy):
        consolidate(tmp_path, tmp_path / "out.ckpt")


def test_parameters_in_other_groups_are_refused():
    saved = {"state": {}, "param_groups": [{"params": ["a"]}, {"params": ["b"]}]}
    assert [group["params"] for group in to_numbers(saved, [("a",), ("b",)], "it")["param_groups"]] == [[0], [1]]
    with pytest.raises(CheckpointError, match=re.escape("in other groups")):
        to_numbers(saved, [("b",), ("a",)], "it")
