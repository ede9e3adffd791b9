"""Peers whose processes made different data are told so before anything is concluded from a batch."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_3d.data.same_samples import checksum, named_leaves
from lightning_3d.errors import DivergenceError, UnsupportedError
from tests.parity import make_trainer
from tests.workers import run
from tests.zoo.plain import MLP


class Counts(MLP):
    steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return super().training_step(batch, batch_idx)


def _fit(sizes):
    """Data that each process draws for itself, the commonest slip of a first try."""
    module = Counts()
    torch.seed()
    x, y = torch.randn(16, 8), torch.zeros(16, 1)
    try:
        make_trainer(2, sizes, max_steps=1).fit(module, DataLoader(TensorDataset(x, y), batch_size=8))
    except DivergenceError as error:
        return str(error), module.steps
    return "", module.steps


@pytest.mark.parametrize("axis", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_data_without_a_seed_is_named_before_the_module_runs(axis):
    for said, steps in run(_fit, {axis: 2}, world=2):
        assert steps == 0
        assert "batch[0] has other values (float32 [8, 8]) (equal on: 0 | 1)" in said
        assert "ranks of data rank 0" in said
        assert "seed_everything(1, workers=True)" in said
        assert "batch[1]" not in said


def test_data_of_data_ranks_may_differ():
    for said, steps in run(_fit, {}, world=2):
        assert said == ""
        assert steps == 1


Pair = namedtuple("Pair", "first second")


class Named(torch.Tensor):
    """Keeps a label that an operation loses, and asks for it in `clone`, if it is not `kept`."""

    kept = False

    def clone(self):
        return super().clone() if self.kept else Named.of(super().clone(), self.label)

    @classmethod
    def of(cls, tensor, label):
        tensor = tensor.as_subclass(cls)
        tensor.label = label
        return tensor


class Kept(Named):
    kept = True


def test_a_class_of_tensors_is_refused_where_its_clone_fails():
    x = torch.arange(3.0)
    assert checksum(Kept.of(x, "x")) == checksum(x)
    with pytest.raises(
        UnsupportedError, match=r"has a Named, .* whose own `clone` fails .* data ranks alone, with any zero_stage"
    ):
        checksum(Named.of(x, "x"))


@dataclass
class Boxes:
    corners: torch.Tensor
    label: str


def test_a_leaf_is_named_by_the_expression_that_finds_it():
    batch = {"x": Pair(torch.zeros(1), [2, "three"]), "boxes": [Boxes(torch.ones(1), "cat")]}
    assert [name for name, _ in named_leaves(batch, "batch")] == [
        "batch['x'].first", "batch['x'].second[0]", "batch['x'].second[1]",
        "batch['boxes'][0].corners", "batch['boxes'][0].label",
    ]  # fmt: skip
    assert [leaf for name, leaf in named_leaves(batch, "batch") if eval(name, {"batch": batch}) is not leaf] == []
