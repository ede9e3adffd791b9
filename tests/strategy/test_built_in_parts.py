"""Modules built in `configure_model`, in `trainer.init_module()` and on meta: each rank computes its own part only."""

import math
import os
import re

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import nn

from lightning_3d.sandbox import build_recorder, deferred
from lightning_3d.sandbox.deferred import Deferred
from lightning_3d.strategy import placing, processes
from tests.parity import caught_warnings, layouts, long, make_trainer
from tests.workers import run
from tests.zoo.base import Base
from tests.zoo.language import GPT, Block

LAYOUTS = layouts("zero3", "tensor-pipeline", "tensor-zero3", "tensor-zero2", "pipeline", "zero0")
SHORT = ("zero3", "tensor-pipeline")


class Late(GPT):
    """As nanoGPT: normal values everywhere, then again on the last layers of each block, and a tied head."""

    def __init__(self):
        Base.__init__(self)
        self.embed = None

    def configure_model(self):
        if self.embed is not None:
            return
        self.embed, self.positions = nn.Embedding(self.vocabulary, 16), nn.Embedding(8, 16)
        self.blocks = nn.ModuleList([Block(16, 4) for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, self.vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.apply(self._first_values)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, 0.0, 0.02 / math.sqrt(6))
        with torch.no_grad():
            self.positions.weight[0] = 0.0
            self.embed.weight.data[1:3].mul_(2.0)
            if self.embed.weight.sum().item() < 1e9:  # a value that is read
                self.norm.weight.mul_(torch.linspace(0.9, 1.1, 16))
        self.stream = torch.get_rng_state()

    def _first_values(self, part):
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, 0.0, 0.02)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)

    def on_train_start(self):
        self.first = {
            name: value.clone() for name, value in self.trainer.strategy.lightning_module_state_dict().items()
        }
        self.after = torch.get_rng_state()


def _fit(world, strategy):
    deferred.SMALL, build_recorder.ROOM = 0, 4096  # else all of a small module stays in memory
    seed_everything(7, verbose=False)
    module = Late()
    make_trainer(world, strategy, quiet=True, max_epochs=1, limit_val_batches=0).fit(module)
    return {"first": module.first, "stream": module.stream, "after": module.after, "losses": module.seen}


@pytest.mark.parametrize("layout", [name if name in SHORT else long(name) for name in LAYOUTS])
def test_first_values_are_those_of_one_device(layout):
    world, strategy = LAYOUTS[layout]
    (wanted,) = run(_fit, 1, None, world=1)
    for got in run(_fit, world, strategy, world=world):
        assert got["first"].keys() == wanted["first"].keys()
        assert [name for name, value in wanted["first"].items() if not torch.equal(got["first"][name], value)] == []
        assert torch.equal(got["stream"], wanted["stream"])
        assert torch.equal(got["after"], wanted["after"])
        torch.testing.assert_close(got["losses"], wanted["losses"], rtol=1e-5, atol=1e-5)


def _freed(module):
    return [name for name, parameter in module.named_parameters() if isinstance(parameter, Deferred)]


def _in_init_module(strategy):
    """A module that is built in `__init__`, and whose weights are changed afterwards."""
    deferred.SMALL = 0
    seed_everything(7, verbose=False)
    trainer = make_trainer(1 if strategy is None else 2, strategy, quiet=True, max_steps=1, limit_val_batches=0)
    with trainer.init_module():
        module = Early()
    freed = _freed(module)
    module.norm.load_state_dict({"weight": torch.full((16,), 0.5), "bias": torch.zeros(16)})
    with caught_warnings() as caught:
        trainer.fit(module)
    named = [text for text in caught if "Each rank builds" in text]
    return {"first": module.first, "freed": freed, "named": named}


class Early(Late):
    def __init__(self):
        super().__init__()
        Late.configure_model(self)


def test_init_module_builds_in_parts_and_keeps_what_is_written_after_it():
    (wanted,) = run(_in_init_module, None, world=1)
    assert wanted["freed"] == []
    for rank, got in enumerate(run(_in_init_module, {"zero_stage": 3}, world=2)):
        assert len(got["freed"]) == len(wanted["first"]) - 1  # the tie
        assert [name for name, value in wanted["first"].items() if not torch.equal(got["first"][name], value)] == []
        reason = "Each rank builds norm.weight, norm.bias in full .* its value was used before training"
        assert rank or any(re.match(reason, text) for text in got["named"])


class Unlike(Late):
    """Without a seed ranks draw other numbers, and rank 0 fills one weight in its own way."""

    def configure_model(self):
        super().configure_model()
        if torch.distributed.get_rank() == 0:
            nn.init.constant_(self.positions.weight, 3.0)


def _unlike():
    deferred.SMALL = 0
    os.environ.pop("PL_GLOBAL_SEED", None)
    torch.manual_seed(int(os.environ["RANK"]))
    module = Unlike()
    make_trainer(2, {"zero_stage": 3}, quiet=True, max_steps=1, limit_val_batches=0).fit(module)
    return {"first": module.first}


def test_ranks_that_build_otherwise_begin_with_the_values_of_rank_0():
    one, other = run(_unlike, world=2)
    assert bool((one["first"]["positions.weight"] == 3.0).all())
    assert [name for name, value in one["first"].items() if not torch.equal(other["first"][name], value)] == []


def _held_on_host(strategy, kind=None):
    """A module whose ranks compute elsewhere: on `cpu:0`, which is the same CPU but another device by its name."""
    before, moved = (deferred._moved, processes.keep_on_host), []

    def move(value, device):
        moved.append(value)
        return value.clone()

    placing.SMALL = deferred.SMALL = 0
    deferred._moved = move
    processes.keep_on_host = lambda module, device: placing.keep_on_host(module, torch.device("cpu", 0))
    try:
        seed_everything(7, verbose=False)
        module = (kind or Early)()
        make_trainer(1 if strategy is None else 2, strategy, quiet=True, max_epochs=1, limit_val_batches=0).fit(module)
        return {"first": module.first, "losses": module.seen, "moved": len(moved), "names": len(module.first)}
    finally:
        deferred._moved, processes.keep_on_host = before


@pytest.mark.parametrize("strategy", [{"zero_stage": 3}, {"pipeline_parallel_size": 2}], ids=["zero3", "pipeline"])
def test_parts_of_a_module_in_host_memory_move_to_the_device(strategy):
    (wanted,) = run(_held_on_host, None, world=1)
    assert wanted["moved"] == 0
    for got in run(_held_on_host, strategy, world=2):
        assert [name for name, value in wanted["first"].items() if not torch.equal(got["first"][name], value)] == []
        torch.testing.assert_close(got["losses"], wanted["losses"], rtol=1e-5, atol=1e-5)
        if "zero_stage" in strategy:
            assert got["moved"] == got["names"] - 1  # each once, to be sharded; the head is tied
        else:
            assert got["moved"] > 0


@pytest.mark.parametrize("strategy", [{"zero_stage": 3}, long({"tensor_parallel_size": 2})])
def test_values_that_are_computed_on_the_host_move_to_the_device(strategy):
    (wanted,) = run(_held_on_host, None, Late, world=1)
    for got in run(_held_on_host, strategy, Late, world=2):
        assert [name for name, value in wanted["first"].items() if not torch.equal(got["first"][name], value)] == []
        torch.testing.assert_close(got["losses"], wanted["losses"], rtol=1e-5, atol=1e-5)
        assert got["moved"] == 0
