"""Every layout with real kernels on one card: several ranks share it, and gloo carries their messages."""

import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator

from lightning_3d import Strategy3D
from tests.checkpoint.trainings import train as save_or_resume
from tests.context import trained
from tests.parity import (
    QUIET,
    assert_same,
    assert_same_fit,
    build,
    change_differs,
    fit_with,
    reference,
    refused_by_both,
    train,
)
from tests.pipeline.test_later_batches import Labelled, leave_out, of
from tests.workers import run
from tests.zoo.language import UntiedGPT


class SharedCard(CUDAAccelerator):
    """Gives each rank the first card. Their messages need `process_group_backend="gloo"`."""

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        return [torch.device("cuda", 0)] * devices

    def __repr__(self) -> str:
        return "SharedCard()"


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, none is here"),
]
PIPELINE = {"pipeline_parallel_size": 2, "num_microbatches": 2}
LAYOUTS = {
    **{f"zero{stage}": (2, {"zero_stage": stage}) for stage in (0, 1, 2, 3)},
    "tensor": (2, {"tensor_parallel_size": 2}),
    "sequence": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "pipeline": (2, PIPELINE),
    "gpipe": (2, {**PIPELINE, "schedule": "gpipe"}),
    "interleaved": (2, {**PIPELINE, "schedule": "interleaved_1f1b", "stages_per_rank": 2}),
    "zbv": (2, {**PIPELINE, "schedule": "zbv_zero_bubble"}),
    "recompute": (2, {"zero_stage": 3, "recompute": "full"}),
    "selective": (2, {"tensor_parallel_size": 2, "recompute": "selective"}),
    "offload": (2, {"zero_stage": 3, "offload": "all"}),
    "optimizer": (2, {"zero_stage": 2, "offload": {"optimizer": "cpu"}}),
    "activations": (2, {"tensor_parallel_size": 2, "offload": {"activations": "cpu"}}),
    "hybrid": (4, {"zero_stage": 3, "zero_shard_size": 2}),
    "tensor x zero1": (4, {"tensor_parallel_size": 2, "zero_stage": 1}),
    "tensor x zero3": (4, {"tensor_parallel_size": 2, "zero_stage": 3}),
    "pipeline x zero2": (4, {**PIPELINE, "zero_stage": 2}),
    "tensor x pipeline": (4, {**PIPELINE, "tensor_parallel_size": 2}),
    "compressed": (2, {"zero_stage": 1, "grad_compression": "bf16"}),
    "context": (2, {"context_parallel_size": 2}),
    "context x zero3": (4, {"context_parallel_size": 2, "zero_stage": 3}),
    "context x tensor x pipeline": (8, {**PIPELINE, "context_parallel_size": 2, "tensor_parallel_size": 2}),
}
"""Name -> ranks and arguments of the strategy."""
EXPERTS = {"expert_parallel_size": 2}
MIXTURES = {
    "data": (2, {"zero_stage": 3}),
    "owners": (2, EXPERTS),
    "owners x zero3": (4, {**EXPERTS, "zero_stage": 3}),
    "owners x tensor": (4, {**EXPERTS, "tensor_parallel_size": 2}),
    "owners x pipeline": (4, {**EXPERTS, **PIPELINE}),
    "whole": (2, {"tensor_parallel_size": 2, "tensor_plan": {"*.experts": "experts"}}),
}
"""The same of mixtures of experts."""
TRAINER = {"accelerator": SharedCard(), "max_epochs": 2}
ROUNDING = {"16-mixed": 2**-11, "bf16-mixed": 2**-8, "bf16-true": 2**-8}


WORKSPACES = 80 << 20
"""Bytes of cuBLAS for its two threads on a card, and of a batch and its loss."""
BLOCK = 4 * 12 * 1024**2
"""Bytes of a gathered block, the last of the forward: FSDP2 keeps it until the next step."""


def _strategy(arguments):
    return {**arguments, "process_group_backend": "gloo"}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_with_the_numbers_of_one_device(name):
    world, arguments = LAYOUTS[name]
    trainer = {**TRAINER, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    attributes = {"optimizer": "plain_sgd"}
    wanted = reference("GPT", attributes, trainer)
    got = run(train, "GPT", world, _strategy(arguments), attributes, trainer, world=world, timeout=200)
    assert_same(got, wanted, 1e-2 if "grad_compression" in arguments else 1e-4)


@pytest.mark.parametrize(
    ("kind", "name"),
    [*(("Mixtral", name) for name in MIXTURES), *(("Listed", name) for name in MIXTURES if name != "whole")],
)
def test_experts_train_with_the_numbers_of_one_device(kind, name):
    world, arguments = MIXTURES[name]
    module, trainer = f"tests.experts.trained:{kind}", {**TRAINER, "gradient_clip_val": 0.5}
    wanted = reference(module, {}, trainer)
    assert_same(run(train, module, world, _strategy(arguments), {}, trainer, world=world, timeout=200), wanted, 1e-4)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("context", ("padded", "one_key", "qwen3_5", "mamba", "mistral", "t5")),
        ("tensor", ("qwen3", "gemma3")),
        ("pipeline", ("gemma3", "mistral")),
        ("zero3", ("qwen3_5", "t5")),
    ],
)
def test_models_of_hugging_face_train_with_the_numbers_of_one_device(name, kinds):
    """Attention on the card is another kernel than in a proof on the host."""
    world, arguments = LAYOUTS[name]
    trainer = {"accelerator": SharedCard(), "max_steps": 6}
    for kind in kinds:
        build = getattr(trained, f"build_{kind}")
        (wanted,) = run(fit_with, build, None, trainer, world=1, timeout=100)
        flags = {**trainer, "devices": world}
        for got in run(fit_with, build, _strategy(arguments), flags, world=world, timeout=200):
            assert_same_fit(got, wanted, 1e-4)


@pytest.mark.parametrize("name", ["data", "owners", "whole"])
def test_experts_in_half_precision(name):
    """Grouped products of bf16 are a kernel of their own."""
    world, arguments = MIXTURES[name]
    trainer, module = {**TRAINER, "precision": "bf16-mixed"}, "tests.experts.trained:Mixtral"
    wanted = reference(module, {}, trainer)
    for got in run(train, module, world, _strategy(arguments), {}, trainer, world=world, timeout=200):
        assert change_differs(got, wanted) < 8 * ROUNDING["bf16-mixed"]


def test_labels_that_a_later_batch_leaves_out_are_refused_without_a_wait():
    strategy = _strategy({"pipeline_parallel_size": 2, "num_microbatches": 4})
    with refused_by_both(r"cross_entropy leaves out some labels .*loss_scope='batch'"):
        run(fit_with, partial(of, Labelled, leave_out), strategy, {"accelerator": SharedCard()}, world=2, timeout=100)


@pytest.mark.parametrize("format", ["sharded", "full"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("zero3", "tensor x pipeline"),
        ("tensor x pipeline", "offload"),
        ("offload", "optimizer"),
        ("optimizer", "context x zero3"),
        ("context x zero3", "zero1"),
        ("owners x zero3", "owners"),
    ],
)
def test_a_checkpoint_goes_on_in_another_layout(tmp_path, before, after, format):
    path, trainer = str(tmp_path / "saved"), {"accelerator": SharedCard()}
    name = "tests.experts.trained:GroupedQwen3" if "owners" in before else "tests.checkpoint.trainings:GroupedGPT"
    layouts = {**LAYOUTS, **MIXTURES}
    (world, saved), (others, resumed) = layouts[before], layouts[after]
    (whole,) = run(save_or_resume, name, 1, None, 5, None, None, "adamw", trainer, world=1)
    saved = _strategy({**saved, "checkpoint_format": format})
    run(save_or_resume, name, world, saved, 3, None, path, "adamw", trainer, world=world, timeout=200)
    resumed = name, others, _strategy(resumed), 5, path, None, "adamw", trainer
    for result in run(save_or_resume, *resumed, world=others, timeout=200):
        assert result["losses"][-2:] == pytest.approx(whole["losses"][-2:], rel=1e-4)
        for key, weight in whole["weights"].items():
            torch.testing.assert_close(result["weights"][key], weight, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["offload", "optimizer"])
def test_states_in_host_memory_give_the_numbers_of_one_device(name):
    """SGD has no states; Adam's are where the weights are, or in host memory alone."""
    world, arguments = LAYOUTS[name]
    trainer = {**TRAINER, "max_epochs": 1}
    wanted = reference("GPT", {}, trainer)
    assert_same(run(train, "GPT", world, _strategy(arguments), {}, trainer, world=world, timeout=200), wanted, 1e-3)


@pytest.mark.parametrize("precision", ROUNDING)
@pytest.mark.parametrize("name", ["zero1", "zero3", "tensor", "pipeline", "context"])
def test_a_layout_in_half_precision(name, precision):
    world, arguments = LAYOUTS[name]
    trainer, attributes = {**TRAINER, "precision": precision}, {"optimizer": "plain_sgd"}
    wanted = reference("GPT", attributes, trainer)
    for got in run(train, "GPT", world, _strategy(arguments), attributes, trainer, world=world, timeout=200):
        assert change_differs(got, wanted) < 8 * ROUNDING[precision]


class Compiled(UntiedGPT):
    """Its blocks are compiled without the hooks around them, which a pipeline needs."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(map(torch.compile, self.blocks))


@pytest.mark.parametrize("name", ["zero3", "tensor", "pipeline"])
def test_compiled_blocks(name):
    world, arguments = LAYOUTS[name]
    attributes, module = {"optimizer": "plain_sgd"}, f"{__name__}:Compiled"
    wanted = reference(module, attributes, TRAINER)
    got = run(train, module, world, _strategy(arguments), attributes, TRAINER, world=world, timeout=300)
    assert_same(got, wanted, 1e-4)


GROUPED = ("functional.py", "graph.py")
"""torch's grouped products wait by themselves where a width is no multiple of 16 bytes, forward and backward."""


class Waits(Callback):
    """Where the host waited for the card in five steps, none of which is compared with a whole one."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 9:
            torch.cuda.set_sync_debug_mode("warn")
            self.said = warnings.catch_warnings(record=True)
            self.places = self.said.__enter__()
            warnings.simplefilter("always")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 13:
            torch.cuda.set_sync_debug_mode("default")
            self.said.__exit__(None, None, None)


def _waits(name, strategy, world):
    waits, module = Waits(), build(name)
    module.samples = 200
    module.on_train_batch_end = lambda *_: None  # reads the loss
    flags = {"accelerator": SharedCard(), "devices": world, "max_steps": 15, "limit_val_batches": 0}
    flags |= {"precision": "bf16-mixed", "callbacks": [waits]}
    Trainer(**{**QUIET, **flags}, strategy=Strategy3D(**strategy, quiet=True)).fit(module)
    said = [Path(each.filename) for each in waits.places if "synchroniz" in str(each.message)]
    return Counter(file.name for file in said if file.name not in GROUPED)


def small():
    from tests.bench.bench_gpu import Large

    return Large(width=64, blocks=4, vocabulary=100, length=16, batch=8)


@pytest.mark.parametrize("name", ["context", "tensor", "zero3", "owners"])
def test_the_host_waits_for_numbers_of_tokens_alone(name):
    """Owners of experts read how many tokens come, once for each of two layers."""
    world, arguments = {**LAYOUTS, **MIXTURES}[name]
    module, wanted = (small, {}) if name != "owners" else ("tests.experts.trained:Mixtral", {"group.py": 5 * 2})
    assert run(_waits, module, _strategy(arguments), world, world=world, timeout=200) == [wanted] * world


def test_a_run_uses_no_group_of_the_run_before():
    """Gradients are added in a thread of the card, in which DTensor remembers meshes too."""
    module, trainer = "tests.experts.trained:Listed", {**TRAINER, "max_epochs": 1}
    for name in ("owners x tensor", "owners x pipeline", "owners x zero3", "owners x pipeline"):
        run(train, module, 4, _strategy(MIXTURES[name][1]), {}, trainer, world=4, timeout=200)


class Peak(Callback):
    """Bytes that this process had on the card in steps that follow the first two."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 2:
            torch.cuda.reset_peak_memory_stats()
            self.kept = torch.cuda.memory_allocated()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.peak = torch.cuda.max_memory_allocated()


def _memory(strategy, world):
    from tests.bench.bench_gpu import Large

    peak, planned = Peak(), {}

    class Report(Callback):
        def on_train_epoch_end(self, trainer, module):
            planned.update(vars(trainer.strategy.memory_report().ranks[trainer.global_rank]))

    flags = {"accelerator": SharedCard(), "devices": world, "max_steps": 5, "callbacks": [peak, Report()]}
    module = Large(width=1024, blocks=8, vocabulary=2000, length=256, batch=4)
    Trainer(**{**QUIET, **flags, "limit_val_batches": 0}, strategy=Strategy3D(**strategy, quiet=True)).fit(module)
    counted = sum(planned[what] for what in ("weights", "gradients", "states", "buffers"))
    return {"kept": peak.kept, "peak": peak.peak, "counted": counted}


@pytest.mark.parametrize(
    "name", ["zero1", "zero3", "tensor", "pipeline", "context", "recompute", "offload", "optimizer"]
)
def test_the_card_holds_what_the_report_counts(name):
    """Between steps a rank has weights, gradients and states on the card, unless they are offloaded."""
    world, arguments = LAYOUTS[name]
    for rank in run(_memory, _strategy(arguments), world, world=world, timeout=200):
        print(name, rank)
        if "offload" in arguments:
            assert rank["kept"] < 0.7 * rank["counted"]
        else:
            sharded = "zero_stage" in arguments or "context_parallel_size" in arguments
            beside = WORKSPACES + (BLOCK if sharded else 0)
            assert rank["counted"] <= rank["kept"] < 1.01 * rank["counted"] + beside
