"""`memory_report()` counts the tensors of each rank, and `fit` prints one line of it."""

import re
import warnings

import pytest
from lightning.pytorch import Callback, Trainer

from lightning_3d import Strategy3D
from lightning_3d.errors import RunError
from tests.parity import QUIET, long
from tests.workers import run
from tests.zoo.language import UntiedGPT

LAYOUTS = {"zero3": {"zero_stage": 3}, "pipeline": {"pipeline_parallel_size": 2}, "tensor": {"tensor_parallel_size": 2}}


class Look(Callback):
    def on_train_epoch_end(self, trainer, module):
        self.report = trainer.strategy.memory_report()
        steps = [each for optimizer in trainer.optimizers for state in optimizer.state.values() for each in state]
        self.steps = steps.count("step")


def _report(strategy, quiet, epochs):
    warnings.simplefilter("ignore")
    from lightning_3d.strategy import fit_report

    printed, look, module = [], Look(), UntiedGPT()
    fit_report.rank_zero_info, before = printed.append, fit_report.rank_zero_info
    try:
        chosen = Strategy3D(quiet=quiet, teardown="sharded", **strategy)
        trainer = Trainer(**{**QUIET, "callbacks": [look]}, devices=2, strategy=chosen, max_epochs=epochs)
        trainer.fit(module)
    finally:
        fit_report.rank_zero_info = before
    with pytest.raises(RunError, match="outside of fit"):
        chosen.memory_report()
    local = [each.to_local() if hasattr(each, "to_local") else each for each in module.parameters()]
    here = sum(each.numel() * 4 for each in local if not each.is_meta)
    return {"report": look.report, "steps": look.steps, "here": here, "lines": [t for t in printed if "epoch" in t]}


@pytest.mark.parametrize("layout", ["zero3", *(long(name) for name in ("pipeline", "tensor"))])
def test_counted_bytes_are_those_of_the_tensors_of_each_rank(layout):
    everywhere = run(_report, LAYOUTS[layout], False, 3, world=2)
    for rank, got in enumerate(everywhere):
        mine = got["report"].ranks[rank]
        assert mine.weights == mine.gradients == got["here"]  # fp32
        assert mine.states == 2 * got["here"] + 4 * got["steps"]  # AdamW, and its step counts
        assert mine.buffers == 0
        assert mine.rest is None
        assert mine.peak > mine.weights + mine.gradients + mine.states
        assert got["report"] == everywhere[0]["report"]
        assert len(str(got["report"]).splitlines()) == 3
        (line,) = got["lines"]
        assert re.match(
            r"memory after the first epoch, rank \d: .* weights \+ .* gradients \+ .* states after a step", line
        )
        if layout != "tensor":  # the plan leaves out that tensor ranks round
            assert mine.planned.total == pytest.approx(4 * mine.weights, rel=0.05)


def test_quiet_prints_nothing():
    assert [got["lines"] for got in run(_report, {"zero_stage": 3}, True, 1, world=2)] == [[], []]
