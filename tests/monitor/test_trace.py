"""The monitor's shares of a step against a trace of torch's profiler over the same batches."""

import json
import threading
import time

import pytest
import torch
from lightning.pytorch import Callback

from lightning_3d import Monitor3D
from tests.monitor.test_monitor import Kept
from tests.parity import make_trainer
from tests.workers import run
from tests.zoo import MODULES

FIRST, BATCHES = 2, 14
"""The monitor's first report is of these batches."""
LAYOUTS = {
    "data_axis": ({"zero_stage": 0}, "data_parallel"),
    "tensor_axis": ({"tensor_parallel_size": 2}, "tensor_parallel"),
    "pipeline_idle": ({"pipeline_parallel_size": 2, "num_microbatches": 2}, "pipeline_parallel"),
}


class Traced(Callback):
    """Traces the batches of the report. The second rank is slow, so that the first has something to wait for."""

    def __init__(self, file):
        self.file, self.count = file, 0
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def on_train_batch_start(self, trainer, module, batch, index):
        if self.count == FIRST:
            self.profile.start()
            self.began = time.perf_counter()

    def on_before_zero_grad(self, trainer, *_):
        time.sleep(0.08 * trainer.global_rank)

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        self.count += 1
        if self.count == BATCHES:
            self.seconds = time.perf_counter() - self.began
            self.profile.stop()
            self.profile.export_chrome_trace(self.file)


def shares(folder, strategy, axis):
    """The monitor's shares on rank 0, and the part of the same time that the trace has in ranges of `axis`."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    traced = Traced(f"{folder}/{threading.get_native_id()}_{rank}.json")
    logger = Kept()
    flags = {"logger": logger, "max_steps": BATCHES, "log_every_n_steps": BATCHES, "limit_val_batches": 0}
    trainer = make_trainer(2, {**strategy, "timeout": 60}, **flags, max_epochs=-1, callbacks=[Monitor3D(), traced])
    trainer.fit(MODULES["UntiedGPT"]())
    with open(traced.file) as file:
        events = json.load(file)["traceEvents"]
    named = [event for event in events if event.get("cat") == "user_annotation" and axis in event["name"]]
    ranges = [event for event in named if "sending" not in event["name"]]  # a send begins, and waits for nobody
    spent = sum(event["dur"] for event in ranges) / 1e6
    found = next(iter(logger.kept.values())) if logger.kept else {}
    return {
        name.rpartition("/")[2]: value for name, value in found.items() if "/share/" in name
    }, spent / traced.seconds


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_share_is_that_of_a_trace(tmp_path, name):
    strategy, axis = LAYOUTS[name]
    (found, traced), _ = run(shares, str(tmp_path), strategy, axis, world=2)
    waits = sum(share for part, share in found.items() if part in (name, "pipeline_axis"))
    print(name, round(waits, 4), round(traced, 4))
    assert traced > 0.1, "there is something to compare"
    assert waits == pytest.approx(traced, rel=0.1)
