"""Weights of a sharded checkpoint are read when they are used, and are those of a plain `load_state_dict`."""

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import nn

from lightning_3d import Strategy3D
from lightning_3d.checkpoint import load
from lightning_3d.checkpoint.load import load_weights
from lightning_3d.checkpoint.stored import Opened
from lightning_3d.sandbox import deferred
from lightning_3d.sandbox.deferred import Deferred, computed_on_use, realize
from tests.checkpoint.made import save
from tests.checkpoint.trainings import build, train
from tests.parity import QUIET, long, make_trainer
from tests.workers import run
from tests.zoo.language import GPT


class Odd(nn.Module):
    """A tie, another dtype, a view, a transposed weight and a buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(6, 4)
        self.second.weight = self.first.weight
        self.narrow = nn.Linear(4, 3).bfloat16()
        self.seen = nn.Linear(4, 3)
        self.view = self.seen.weight.data[1]
        self.turned = nn.Parameter(torch.randn(5, 7).t())
        self.norm = nn.BatchNorm1d(3)


def _state(directory):
    return Opened.open(directory).state()["state_dict"]


@pytest.fixture
def stored(tmp_path, monkeypatch):
    monkeypatch.setattr(deferred, "SMALL", 0)
    seed_everything(3, verbose=False)
    saved = Odd()
    state = {name: value.float() if value.is_floating_point() else value for name, value in saved.state_dict().items()}
    save(tmp_path / "one.ckpt", state)
    return saved, tmp_path / "one.ckpt"


def test_values_are_those_of_load_state_dict(stored):
    saved, path = stored
    module = Odd()
    stride = module.turned.stride()
    load_weights(module, _state(path), True, torch.device("cpu"))
    later = {name for name, parameter in module.named_parameters() if isinstance(parameter, Deferred)}
    assert later == {name for name, _ in saved.named_parameters()} - {"seen.weight", "norm.weight", "norm.bias"}
    with computed_on_use(module), torch.no_grad():  # vectors have their values, and matrices others
        assert torch.equal(module.narrow.bias, saved.narrow.bias)
        assert not torch.equal(module.narrow.weight, saved.narrow.weight)
        assert torch.equal(module.first.weight, module.second.weight)
        assert torch.isfinite(module.turned).all()
    realize(module.parameters())
    for name, value in saved.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
    assert module.second.weight is module.first.weight
    assert module.view.data_ptr() == module.seen.weight[1].data_ptr()
    assert module.turned.stride() == stride


def test_missing_unexpected_and_other_shapes_are_errors(stored):
    _, path = stored
    module = Odd()
    del module.narrow
    module.more = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"missing keys \['more.bias', 'more.weight'\], unexpected keys \['narrow"):
        load_weights(module, _state(path), True, torch.device("cpu"))
    load_weights(module, _state(path), False, torch.device("cpu"))
    module = Odd()
    module.turned = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(RuntimeError, match="size mismatch for turned"):
        load_weights(module, _state(path), True, torch.device("cpu"))


def test_code_of_the_user_gets_all_of_it(stored):
    _, path = stored
    module = Odd()
    seen = []
    module.first.register_load_state_dict_pre_hook(lambda _, state, prefix, *__: seen.append(state[f"{prefix}weight"]))
    load_weights(module, _state(path), True, torch.device("cpu"))
    assert len(seen) == 1
    assert not any(isinstance(parameter, Deferred) for parameter in module.parameters())


@pytest.mark.parametrize("code", ["hook", "override"])
def test_code_of_the_user_gets_all_of_it_once(code, stored, monkeypatch):
    monkeypatch.setattr(load, "BATCH_BYTES", 8)
    _, path = stored
    seen = []

    class Own(nn.BatchNorm1d):
        def _load_from_state_dict(self, state, prefix, *given):
            seen.append(len(state))
            super()._load_from_state_dict(state, prefix, *given)

    module, calls = Odd(), []
    original = module.load_state_dict
    monkeypatch.setattr(
        module, "load_state_dict", lambda *given, **named: (calls.append(1), original(*given, **named))[1]
    )
    load_weights(module, _state(path), True)
    assert len(calls) > 2  # of torch's own modules some bytes at a time are in memory
    module = Odd()
    if code == "override":
        module.norm = Own(3)
    else:
        module.norm.register_load_state_dict_pre_hook(lambda _, state, *__: seen.append(len(state)))
    load_weights(module, _state(path), True)
    assert seen == [len(module.norm.state_dict())]


def test_what_the_user_changes_in_place_is_loaded(stored):
    _, path = stored
    state, module = _state(path), Odd()
    state["first.bias"].zero_()
    state.get("narrow.bias").fill_(2)
    state.setdefault("seen.bias").fill_(3)
    (state | {})["second.bias"].fill_(4)
    load_weights(module, state, True, torch.device("cpu"))
    sums = [float(part.bias.detach().sum()) for part in (module.first, module.narrow, module.seen, module.second)]
    assert sums == [0, 6, 9, 16]


class WithMomentum(GPT):
    optimizer = "sgd"


class Zeroes(WithMomentum):
    """Changes a weight and its momentum in place."""

    def on_load_checkpoint(self, checkpoint):
        checkpoint["state_dict"]["norm.weight"].zero_()
        number = [name for name, _ in self.named_parameters()].index("norm.weight")
        entries = checkpoint["optimizer_states"][0]["state"]
        entry = entries["norm.weight"] if "norm.weight" in entries else entries[number]
        max((value for value in entry.values() if isinstance(value, torch.Tensor)), key=torch.numel).zero_()


def _resumed_in_place(world, strategy, path):
    for kind, steps, given in ((WithMomentum, 5, None), (Zeroes, 7, path)):
        seed_everything(7, verbose=False)
        module = kind()
        trainer = make_trainer(world, strategy, quiet=True, max_steps=steps, limit_val_batches=0)
        trainer.fit(module, ckpt_path=given)
        if given is None:
            trainer.save_checkpoint(path)
    return module.seen


def test_a_run_resumes_with_what_the_user_changed_in_place(tmp_path):
    (wanted,) = run(_resumed_in_place, 1, {}, str(tmp_path / "one.ckpt"), world=1)
    strategy = {"zero_stage": 3, "checkpoint_format": "sharded"}
    for got in run(_resumed_in_place, 2, strategy, str(tmp_path / "d.ckpt"), world=2):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def _resumed(strategy, world, path):
    deferred.SMALL, before = 0, deferred.SMALL
    calls, original = [], load.read_later
    load.read_later = lambda *given: (calls.append(given[0]), original(*given))
    try:
        return {**train("GPT", world, strategy, 10, path), "later": len(calls)}
    finally:
        deferred.SMALL, load.read_later = before, original


@pytest.mark.parametrize(
    "strategy",
    [
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
        long({"tensor_parallel_size": 2, "zero_stage": 3}),
        long({"pipeline_parallel_size": 4}),
    ],
)
def test_a_run_resumes_in_another_layout(strategy, tmp_path):
    path = str(tmp_path / "d.ckpt")
    (wanted,) = run(train, "GPT", 1, None, 10, world=1)
    run(train, "GPT", 2, {"zero_stage": 3, "checkpoint_format": "sharded"}, 5, None, path, world=2)
    for got in run(_resumed, strategy, 4, path, world=4):
        assert got["later"] == len(list(GPT().parameters()))
        torch.testing.assert_close(got["losses"], wanted["losses"][5:], rtol=1e-5, atol=1e-5)


def _saved_after_validation(path):
    module = build("GPT")
    strategy = Strategy3D(pipeline_parallel_size=2, checkpoint_format="sharded", teardown="whole")
    trainer = Trainer(**QUIET, devices=2, strategy=strategy, max_steps=5, limit_val_batches=1)
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    trainer.save_checkpoint(path)


def test_after_a_validation_optimizers_have_the_parameters_of_the_module(tmp_path):
    """A pipeline replaces the parameters of other stages, in an evaluation too."""
    path = str(tmp_path / "d.ckpt")
    (wanted,) = run(train, "GPT", 1, None, 10, world=1)
    run(_saved_after_validation, path, world=2)
    (got,) = run(train, "GPT", 1, {}, 10, path, world=1)
    torch.testing.assert_close(got["losses"], wanted["losses"][5:], rtol=1e-5, atol=1e-5)
