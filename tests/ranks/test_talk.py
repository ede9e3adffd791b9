"""What ranks tell each other does not pass through what a user may replace."""

import copy
import pickle
import warnings
from unittest import mock

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import nn

from lightning_3d import Strategy3D
from lightning_3d.ranks import talk
from tests.parity import QUIET
from tests.workers import on_ranks, run
from tests.zoo import MODULES

VALUES = [
    torch.arange(6, dtype=torch.int16).reshape(2, 3).T, torch.tensor(2.5, dtype=torch.bfloat16), torch.empty(0, 3),
    torch.tensor([1 + 2j]).conj(), torch.tensor([True, False]), torch.ones(2, requires_grad=True),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(value.dtype))
def test_a_tensor_arrives_as_it_was(value):
    with mock.patch("torch.save"):
        got = pickle.loads(talk.pickled({"x": [value]}))["x"][0]
    assert got.dtype == value.dtype
    assert got.shape == value.shape
    assert got.requires_grad == value.requires_grad
    assert torch.equal(got, value)


def test_parameters_and_what_is_not_strided():
    for value in (nn.Parameter(torch.ones(3)), torch.eye(3).to_sparse()):
        got = pickle.loads(talk.pickled(value))
        assert type(got) is type(value)
        assert torch.equal(got.to_dense(), value.to_dense())


@on_ranks(3)
def test_with_torch_save_replaced_on_every_rank():
    rank = torch.distributed.get_rank()
    with mock.patch("torch.save"), mock.patch("torch.load"):
        everyone = talk.gather(torch.full((2,), float(rank)))
        second = talk.from_first(lambda: {"of": torch.tensor(rank)}, first=1)
    assert (torch.stack(everyone).tolist(), int(second["of"])) == ([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]], 1)


def _fit(settings, patched, folder):
    seed_everything(7, verbose=False)
    from lightning.pytorch.callbacks import ModelCheckpoint

    flags = {**QUIET, "enable_checkpointing": True}
    keep = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1)
    trainer = Trainer(
        **flags, devices=2, max_epochs=1, limit_train_batches=3, callbacks=[keep], default_root_dir=folder,
        strategy=Strategy3D(**settings, timeout=60.0, quiet=True),
    )  # fmt: skip
    module = copy.deepcopy(MODULES["MLP"]())
    with mock.patch("torch.save") if patched else warnings.catch_warnings():
        trainer.fit(module)
    return [float(p.detach().double().sum()) for p in module.parameters()]


@pytest.mark.parametrize("settings", [{"zero_stage": 3}, {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}])
def test_a_fit_with_torch_save_replaced_ends_as_without(tmp_path, settings):
    plain = run(_fit, settings, False, str(tmp_path / "plain"), world=2)
    assert run(_fit, settings, True, str(tmp_path / "mocked"), world=2) == plain
    assert not (tmp_path / "mocked" / "flight").exists()
