"""A card has the bytes of the plan: the parts of its rank after set-up, at the peak of a step, and between steps."""

import gc

import pytest
from lightning.pytorch import Callback, Trainer

from lightning_3d import Strategy3D
from lightning_3d.sandbox import build_recorder
from tests.device.accelerator import CardAccelerator
from tests.device.card import Memory, reset_peak
from tests.device.ranks import run
from tests.parity import QUIET, build
from tests.planner.test_account import LAYOUTS, planned

BLOCK = 4 * 12 * 256**2
"""Bytes of the matrices of a block."""
STEP = 2


class Bytes(Callback):
    """On the card, above those before: at the peak of set-up, after it, between two steps, and at the peak of one."""

    def __init__(self):
        gc.collect()
        self.before = Memory.allocated
        reset_peak()

    def on_train_start(self, trainer, module):
        gc.collect()
        self.set_up, self.kept = Memory.peak - self.before, Memory.allocated - self.before

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == STEP:
            gc.collect()
            reset_peak()
            self.between = Memory.allocated - self.before

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == STEP:
            self.peak = Memory.peak - self.before


def measured(strategy, world):
    build_recorder.ROOM = 0  # a proof frees each parameter, however small, as it does those of a large module
    found = Bytes()
    flags = {"accelerator": CardAccelerator(), "devices": world, "max_steps": STEP + 1, "limit_val_batches": 0}
    strategy = Strategy3D(**strategy, quiet=True)
    Trainer(**{**QUIET, **flags}, callbacks=[found], strategy=strategy).fit(build("tests.zoo.sized:GPT"))
    return found.set_up, found.kept, found.between, found.peak


def judge(layout, ranks, blocks):
    """Compare with the plan. Set-up may take `blocks` full blocks above a rank's own weights."""
    plan = planned("GPT", layout, "32")
    for rank, (set_up, kept, between, peak) in enumerate(ranks):
        stage = plan.layout.coordinate(rank)["pipeline_parallel"]
        states = plan.states(stage)
        gathered = BLOCK * (plan.layout.zero_stage == 3)  # the last block of the forward: FSDP2 keeps it
        assert set_up < states.weights + blocks * BLOCK, "set-up has weights of other ranks"
        assert states.weights <= kept < 1.03 * states.weights, "weights of other ranks stay after set-up"
        assert between < 1.03 * (states.weights + states.gradients + states.optimizer) + gathered, "stays gathered"
        assert peak == pytest.approx(plan.memory[min(stage, len(plan.memory) - 1)].total, rel=0.1)


# the proof of a tensor plan computes a block whole and in shards
@pytest.mark.parametrize(("layout", "blocks"), [("2 zero3", 1), ("2 pipeline", 2), ("2 tensor", 4)])
def test_memory_of_another_ranks_part(layout, blocks):
    judge(layout, run(measured, LAYOUTS[layout], 2, world=2), blocks)
