"""Resumed in the same layout in the middle of an epoch, a run goes on bit for bit."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_3d.checkpoint.own import Found, restore_own
from lightning_3d.ranks.random_streams import main_streams
from tests.checkpoint.trainings import train
from tests.workers import run

SHARDED, FULL = {"checkpoint_format": "sharded"}, {"checkpoint_format": "full"}


@pytest.mark.parametrize(
    ("layout", "trainer"),
    [
        (SHARDED | {"zero_stage": 1}, {}),
        (FULL | {"zero_stage": 1}, {"mixed": True}),
        (SHARDED | {"zero_stage": 0, "grad_compression": "int8"}, {}),
        (FULL | {"zero_stage": 0, "grad_compression": "powersgd"}, {}),
        (FULL | {"zero_stage": 1, "grad_compression": "int8"}, {}),
        (SHARDED | {"zero_stage": 2, "grad_compression": "powersgd"}, {}),
        (SHARDED | {"zero_stage": 3}, {"mixed": True}),
        (SHARDED | {"zero_stage": 3, "async_checkpoint": True}, {"accumulate_grad_batches": 2, "max_steps": 8}),
        (SHARDED | {"tensor_parallel_size": 2}, {}),
        (SHARDED | {"pipeline_parallel_size": 2}, {}),
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


def test_leftovers_of_compression_that_another_layout_cannot_use_are_told():
    saved = {"compressions": [{"0": torch.ones(2)}], "orders": []}
    elsewhere = {"data": [0, 1], "streams": main_streams(), "cuda": None, "step": [], "communication": saved}
    with pytest.warns(UserWarning, match=r"grad_compression had left over .* starts at zero again"):
        restore_own(Found(data=elsewhere, everyone=[elsewhere]), SimpleNamespace(states=[1]), None, None)
