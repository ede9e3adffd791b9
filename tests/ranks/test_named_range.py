"""A trace of torch's profiler has a named range for every collective; without a profiler there is none."""

import json
import threading

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.profilers import PyTorchProfiler
from torch.autograd import profiler

from lightning_3d.module.torch_private import named_range
from tests.parity import make_trainer, silent
from tests.workers import run
from tests.zoo import MODULES


class Traced(Callback):
    """Traces the third batch, and notes the ranges of the package that are opened in the others."""

    def __init__(self, file):
        self.file, self.opened = file, []
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.original = profiler.record_function

    def on_train_batch_start(self, trainer, module, batch, index):
        if index == 2:
            profiler.record_function = self.original
            self.profile.start()
        else:
            profiler.record_function = self.note

    def note(self, name, *args):
        """Torch's loaders and optimizers open ranges too."""
        self.opened += [name] if "parallel" in name or "norm" in name else []
        return self.original(name, *args)

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if index == 2:
            self.profile.stop()
            self.profile.export_chrome_trace(self.file)

    def on_train_end(self, trainer, module):
        profiler.record_function = self.original


def trace(folder, module, strategy):
    """The names in the Chrome trace of a batch on this rank, and the ranges that were opened in other batches."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    traced = Traced(f"{folder}/{threading.get_native_id()}_{rank}.json")
    flags = {"max_steps": 4, "limit_val_batches": 0, "default_root_dir": folder, "callbacks": [traced]}
    trainer = make_trainer(2, {"timeout": 60, **strategy}, quiet=True, gradient_clip_val=1.0, **flags)
    with silent():
        trainer.fit(MODULES[module]())
    with open(traced.file) as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    return names, traced.opened


TENSOR = {"tensor_parallel_size": 2}
STAGES = {"pipeline_parallel_size": 2, "num_microbatches": 2, "loss_scope": "microbatch"}
NORM = "all_reduce of the gradient norm"
CASES = {
    "tensor": (TENSOR, {"all_reduce on tensor_parallel", NORM}, set()),
    "sequence": (
        {**TENSOR, "sequence_parallel": True},
        {"all_gather on tensor_parallel", "reduce_scatter on tensor_parallel"},
        set(),
    ),
    "pipeline": (
        STAGES,
        {f"stage 0, microbatch {index}: sending activations to stage 1 on pipeline_parallel" for index in (0, 1)}
        | {"stage 0, microbatch 1: receiving gradients from stage 1 on pipeline_parallel"},
        {f"stage 1, microbatch {index}: receiving activations from stage 0 on pipeline_parallel" for index in (0, 1)}
        | {"stage 1, microbatch 0: sending gradients to stage 0 on pipeline_parallel"},
    ),
    "replicas": ({"zero_stage": 0}, {"waiting for all_reduce on data_parallel"}, set()),
    "shards": (
        {"zero_stage": 3},
        {"waiting for all_gather on data_parallel", "waiting for reduce_scatter on data_parallel"},
        set(),
    ),
    "compressed": (
        {"zero_stage": 1, "grad_compression": "int8"},
        {"waiting for reduce_scatter on data_parallel"},
        set(),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_collective_of_a_step_is_named(tmp_path, case):
    strategy, both, last = CASES[case]
    module = "Encoder" if case == "sequence" else "UntiedGPT"
    first, second = run(trace, str(tmp_path), module, strategy, world=2)
    assert both <= first[0]
    assert (last or both) <= second[0]
    assert first[1] == second[1] == []


def _with_lightnings_profiler(folder):
    flags = {"max_steps": 6, "max_epochs": -1, "limit_val_batches": 0, "default_root_dir": folder}
    named = PyTorchProfiler(dirpath=folder, filename="step")
    make_trainer(2, {**TENSOR, "timeout": 60}, quiet=True, profiler=named, **flags).fit(MODULES["MLP"]())


def test_the_profiler_of_lightning_leaves_the_tensor_plan(tmp_path):
    """Its hooks cannot be copied, so that no block had a plan: the trace was one of an unsplit module."""
    run(_with_lightnings_profiler, str(tmp_path), world=2)
    files = [*tmp_path.glob("*training_step*.json")]
    assert len(files) == 2
    for file in files:
        names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
        assert "all_reduce on tensor_parallel" in names
        assert any(name.startswith("[pl][module]") for name in names if name)


def test_ranges_of_the_background_thread_are_there_where_a_trace_has_all_threads():
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)

    def work():
        for _ in ready.wait(10), done.set():
            with named_range("in the background"):
                torch.ones(2)

    ready, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=config) as trace:
        ready.set()
        thread.join()
    assert "in the background" in {event.name for event in trace.events()}


def test_without_a_profiler_a_range_is_nothing():
    assert named_range("a") is named_range("b")
