"""What the planner says to the byte, against what two and three real ranks held and sent."""

import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback, Trainer

from lightning_3d import Strategy3D
from lightning_3d.planner.exact import bytes_sent, module_shapes, rows_of, states_at_rest
from lightning_3d.planner.states import state_bytes
from tests.modules import MODULES
from tests.parity import QUIET
from tests.workers import run


@given(st.integers(1, 50), st.integers(1, 9))
def test_rows_are_dealt_as_torch_chunks(rows, ranks):
    pieces = [len(piece) for piece in torch.zeros(rows).chunk(ranks)]
    pieces += [0] * (ranks - len(pieces))
    assert [rows_of(rows, rank, ranks) for rank in range(ranks)] == pieces


class Watch(Callback):
    """Bytes sent in each step, and bytes held between steps."""

    def __init__(self):
        self.sent, self.weights, self.optimizer = [], 0, 0

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        trainer.strategy.data_axis.ledger.reset()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.sent.append(trainer.strategy.data_axis.ledger.bytes("data_parallel"))
        states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
        self.weights = sum(_local_bytes(parameter) for parameter in module.parameters())
        self.optimizer = sum(_local_bytes(value) for value in states if value.ndim)


def _local_bytes(tensor):
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.numel() * local.element_size()


def watch(name, world, stage, accumulate=1):
    warnings.simplefilter("ignore")
    watched = Watch()
    chosen = Strategy3D(zero_stage=stage)
    flags = {**QUIET, "devices": world, "strategy": chosen, "max_epochs": 1, "limit_val_batches": 0}
    fit = Trainer(**flags, limit_train_batches=4, accumulate_grad_batches=accumulate, callbacks=[watched])
    fit.fit(MODULES[name]())
    return watched.sent, watched.weights, watched.optimizer


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("name", "world"), [("GPT", 2), ("UntiedGPT", 3), ("Encoder", 2), ("Llama", 2)])
def test_states_and_wire_bytes_are_exact(name, world, stage):
    shapes = module_shapes(MODULES[name]())
    for rank, (sent, weights, optimizer) in enumerate(run(watch, name, world, stage, world=world, timeout=120)):
        held = states_at_rest(shapes, state_bytes("32"), stage=stage, rank=rank, ranks=world)
        assert (weights, optimizer) == (held.weights, held.optimizer)
        assert set(sent[1:]) == {bytes_sent(shapes, stage=stage, ranks=world)}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_wire_bytes_of_accumulated_steps(stage):
    shapes = module_shapes(MODULES["GPT"]())
    for sent, _, _ in run(watch, "GPT", 2, stage, 2, world=2, timeout=120):
        assert sum(sent[2:]) == bytes_sent(shapes, stage=stage, ranks=2, accumulate=2)
