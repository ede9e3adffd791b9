"""Resumed in the same layout in the middle of an epoch, a run goes on bit for bit."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_3d.checkpoint.rank_state import FoundState, restore_state, sending
from lightning_3d.comm.grad_sync import CommConfig
from lightning_3d.errors import CheckpointError
from lightning_3d.ranks.random_streams import main_streams
from tests.checkpoint.trainings import train
from tests.parity import long
from tests.workers import run

SHARDED, FULL = {"checkpoint_format": "sharded"}, {"checkpoint_format": "full"}


@pytest.mark.parametrize(
    ("layout", "trainer"),
    [
        (SHARDED | {"zero_stage": 1}, {}),
        long(FULL | {"zero_stage": 1}, {"mixed": True}),
        long(SHARDED | {"zero_stage": 0, "grad_compression": "int8"}, {}),
        long(FULL | {"zero_stage": 0, "grad_compression": "powersgd"}, {}),
        long(FULL | {"zero_stage": 1, "grad_compression": "int8"}, {}),
        long(SHARDED | {"zero_stage": 2, "grad_compression": "powersgd"}, {}),
        long(SHARDED | {"zero_stage": 3}, {"mixed": True}),
        (SHARDED | {"zero_stage": 3, "async_checkpoint": True}, {"accumulate_grad_batches": 2, "max_steps": 8}),
        long(SHARDED | {"tensor_parallel_size": 2}, {}),
        long(SHARDED | {"pipeline_parallel_size": 2}, {}),
    ],
    ids=str,
)
def test_bit_for_bit(tmp_path, layout, trainer):
    path, stop, steps = str(tmp_path / "a.ckpt"), 7, trainer.get("max_steps", 12)
    flags = {"optimizer": "adamw", "trainer": trainer}
    results = run(_three, layout, steps, stop, path, flags, world=2)
    for whole, after in results:
        assert len(after["losses"]) < len(whole["losses"])
        assert after["losses"] == whole["losses"][-len(after["losses"]) :]
        assert after["step"] == whole["step"]
        assert all(torch.equal(after["weights"][name], weight) for name, weight in whole["weights"].items())


def _three(layout, steps, stop, path, flags):
    """Without interruption; to `stop`; and on from there."""

    def go(steps, resume=None, save=None):
        trainer = {**flags["trainer"], "max_steps": steps}
        if trainer.pop("mixed", False):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
            trainer["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler)]
        return train("NoisyGPT", 2, layout, steps, resume, save, **{**flags, "trainer": trainer})

    whole = go(steps)
    go(stop, None, path)
    return whole, go(steps, path)


class Axis:
    """A data axis that remembers what it was given."""

    def __init__(self, codec, sync="ring"):
        self.config, self.loaded = CommConfig(grad_compression=codec, grad_sync=sync), None

    def load_state_dict(self, state):
        self.loaded = state


def _saved(**changes):
    feedback = {"compressions": [{"0": torch.ones(2)}], "orders": []}
    streams = {"streams": main_streams(), "step": {}}
    return {"data": [0, 1], "communication": feedback, "sending": sending(Axis("int8"), 1.0), **streams, **changes}


def test_error_feedback_is_restored_in_the_same_layout():
    axis, state = Axis("int8"), _saved()
    restore_state(FoundState(same=state, data=state, compressed=True), SimpleNamespace(states={}), axis, 1.0)
    assert axis.loaded is state["communication"]


@pytest.mark.parametrize(
    ("axis", "scale", "same"),
    [
        (Axis("int8"), 1.0, False),
        (Axis("bf16"), 1.0, True),
        (Axis("int8"), 8.0, True),
        (Axis("int8", "hierarchical"), 1.0, True),
    ],
    ids=["layout", "codec", "scale", "sync"],
)
def test_error_feedback_of_other_settings_starts_at_zero(axis, scale, same):
    state = _saved()
    own = FoundState(same=state if same else None, data=state, compressed=True)
    with pytest.warns(UserWarning, match=r"error feedback .* starts at zero"):
        restore_state(own, SimpleNamespace(states={}), axis, scale)
    assert axis.loaded is None


def test_a_damaged_state_is_an_error():
    state = _saved(streams={})
    with pytest.raises(CheckpointError, match=r"rank-local state .* cannot be restored"):
        restore_state(FoundState(same=state, data=state), SimpleNamespace(states={}), Axis("int8"), 1.0)
