"""Every layout with real kernels on one card: several ranks share it, and gloo carries their messages."""

import warnings

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from lightning_3d import Strategy3D
from tests.gpu.shared_card import SharedCard
from tests.parity import QUIET, assert_same, reference, train
from tests.same.test_matrix import _difference
from tests.workers import run
from tests.zoo.language import UntiedGPT

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
}
"""Name -> ranks and arguments of the strategy."""
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


@pytest.mark.parametrize("name", ["offload", "optimizer"])
def test_states_in_host_memory_give_the_numbers_of_one_device(name):
    """SGD has no states; Adam's are where the weights are, or in host memory alone."""
    world, arguments = LAYOUTS[name]
    trainer = {**TRAINER, "max_epochs": 1}
    wanted = reference("GPT", {}, trainer)
    assert_same(run(train, "GPT", world, _strategy(arguments), {}, trainer, world=world, timeout=200), wanted, 1e-3)


@pytest.mark.parametrize("precision", ROUNDING)
@pytest.mark.parametrize("name", ["zero1", "zero3", "tensor", "pipeline"])
def test_a_layout_in_half_precision(name, precision):
    world, arguments = LAYOUTS[name]
    trainer, attributes = {**TRAINER, "precision": precision}, {"optimizer": "plain_sgd"}
    wanted = reference("GPT", attributes, trainer)
    for got in run(train, "GPT", world, _strategy(arguments), attributes, trainer, world=world, timeout=200):
        assert _difference(got, wanted) < 8 * ROUNDING[precision]


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

    warnings.simplefilter("ignore")
    peak, planned = Peak(), {}

    class Report(Callback):
        def on_train_epoch_end(self, trainer, module):
            planned.update(vars(trainer.strategy.memory_report().ranks[trainer.global_rank]))

    flags = {"accelerator": SharedCard(), "devices": world, "max_steps": 5, "callbacks": [peak, Report()]}
    module = Large(width=1024, blocks=8, vocabulary=2000, length=256, batch=4)
    Trainer(**{**QUIET, **flags, "limit_val_batches": 0}, strategy=Strategy3D(**strategy, quiet=True)).fit(module)
    counted = sum(planned[what] for what in ("weights", "gradients", "states", "buffers"))
    return {"kept": peak.kept, "peak": peak.peak, "counted": counted}


@pytest.mark.parametrize("name", ["zero1", "zero3", "tensor", "pipeline", "recompute", "offload", "optimizer"])
def test_the_card_holds_what_the_report_counts(name):
    """Between steps a rank has weights, gradients and states on the card, unless they are offloaded."""
    world, arguments = LAYOUTS[name]
    for rank in run(_memory, _strategy(arguments), world, world=world, timeout=200):
        print(name, rank)
        if "offload" in arguments:
            assert rank["kept"] < 0.7 * rank["counted"]
        else:
            beside = WORKSPACES + (BLOCK if "zero_stage" in arguments else 0)
            assert rank["counted"] <= rank["kept"] < 1.01 * rank["counted"] + beside
