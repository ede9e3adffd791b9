"""Context ranks are peers: with every other parallelism too, training on parts of a sequence is training on one device."""

import pytest
import torch

from lightning_3d import Layout
from tests.checkpoint.trainings import assert_goes_on
from tests.context import trained
from tests.context.trained import assert_same_as_one_device
from tests.parity import assert_parity, fit_with, long
from tests.workers import run

SHORT = ["nano", "padded", "few_heads", "alibi", "smooth", "retention", "slopes"]
BUILDS = [
    name.removeprefix("build_")
    for name in vars(trained)
    if name.startswith("build_") and "dropout" not in name and "checkpointed" not in name
]


@pytest.mark.parametrize("name", [name if name in SHORT else long(name) for name in BUILDS])
def test_two_ranks(name):
    assert_same_as_one_device(getattr(trained, f"build_{name}"), {"context_parallel_size": 2})


TENSOR, PIPELINE, DATA = ({f"{axis}_parallel_size": 2} for axis in ("tensor", "pipeline", "data"))
STRATEGIES = {
    "zero0": ("nano", 2, {"zero_stage": 0}, {}),
    "zero2": ("llama", 2, {"zero_stage": 2}, {"validate": True}),
    "zero3": ("nano", 2, {"zero_stage": 3}, {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}),
    "full": ("llama", 2, {"recompute": "full"}, {}),
    "full_gathered": ("few_heads", 2, {"recompute": "full"}, {}),
    "selective": ("nano", 2, {"recompute": "selective"}, {}),
    "selective_gathered": ("few_heads", 2, {"recompute": "selective"}, {}),
    "offload": ("nano", 2, {"offload": {"activations": "cpu"}, "recompute": "full"}, {}),
    "three": ("padded", 3, {"context_parallel_size": 3}, {}),
    "three_llama": ("llama", 3, {"context_parallel_size": 3}, {}),
    "four": ("nano", 4, {"context_parallel_size": 4}, {}),
    "tensor": ("padded", 4, TENSOR, {}),
    "tensor_smooth": ("smooth", 4, TENSOR, {}),
    "sequence": ("nano", 4, {**TENSOR, "sequence_parallel": True}, {}),
    "pipeline": ("nano", 4, PIPELINE, {"gradient_clip_val": 0.5}),
    "interleaved": (
        "nano", 4, {**PIPELINE, "schedule": "interleaved_1f1b", "stages_per_rank": 2, "num_microbatches": 2}, {}
    ),
    "pipeline_zero3": ("llama", 4, {**PIPELINE, "zero_stage": 3, "recompute": "full"}, {"gradient_clip_val": 0.5}),
    "data_zero3": ("nano", 4, {**DATA, "zero_stage": 3}, {}),
    "eight": ("nano", 8, {**TENSOR, **PIPELINE}, {}),
    "packages": ("checkpointed", 2, {}, {}),
    "mixer_zero0": ("mamba", 2, {"zero_stage": 0}, {"validate": True}),
    "mixer_zero3": ("qwen3_5", 2, {"zero_stage": 3, "recompute": "full"}, {"gradient_clip_val": 0.5}),
    "mixer_selective": ("retention", 2, {"recompute": "selective"}, {"accumulate_grad_batches": 2}),
    "mixer_three": ("mamba", 3, {"context_parallel_size": 3}, {}),
    "mixer_four": ("qwen3_5", 4, {"context_parallel_size": 4}, {}),
    "mixer_tensor": ("retention", 4, TENSOR, {}),
    "mixer_pipeline": ("retention", 4, {**PIPELINE, "zero_stage": 3}, {"gradient_clip_val": 0.5}),
    "mixer_data": ("retention", 4, {**DATA, "zero_stage": 1}, {"gradient_clip_val": 0.5}),
    "tensor_slopes": ("slopes", 4, TENSOR, {}),
}  # fmt: skip
SHORT_NAMES = {"zero3", "selective"}


@pytest.mark.parametrize("name", [name if name in SHORT_NAMES else long(name) for name in STRATEGIES])
def test_the_same_as_one_device(name):
    build, world, strategy, options = STRATEGIES[name]
    strategy = {"context_parallel_size": 2, **strategy}
    assert_same_as_one_device(getattr(trained, f"build_{build}"), strategy, world, **options)


@pytest.mark.long
def test_half_precision_is_as_near_as_rounding():
    strategy = {"context_parallel_size": 2, "zero_stage": 2}
    assert_same_as_one_device(trained.build_nano, strategy, tolerance=3e-2, precision="bf16-mixed")


@pytest.mark.long
@pytest.mark.parametrize("build", [trained.build_dropout, trained.build_retention_dropout])
def test_dropout_is_reproducible_and_peers_stay_equal(build):
    strategy = {"context_parallel_size": 2, "zero_stage": 0, "verify": "replicas"}
    first, again = (run(fit_with, build, strategy, {}, world=2) for _ in range(2))
    (alone,) = run(fit_with, build, None, {}, world=1)
    assert first[0]["losses"] == first[1]["losses"] == again[0]["losses"]
    assert first[0]["losses"] != alone["losses"]  # masks of parts are drawn by part
    torch.testing.assert_close(first[0]["losses"][-1], alone["losses"][-1], rtol=0.3, atol=0)


def test_places_and_messages_name_the_axis():
    layout = Layout(context_parallel_size=2, tensor_parallel_size=2).fit(8)
    assert str(layout) == "data 2 x tensor 2 x context 2 x pipeline 1, ZeRO 1"
    assert str(layout.coordinate(6)) == "pipeline 0, data 1, context 1, tensor 0"
    assert layout.shards == layout.gradient_ranks == 4
    assert str(Layout()) == "data 1 x tensor 1 x pipeline 1, ZeRO 1"


@pytest.mark.parametrize(
    "strategy",
    [
        long({"zero_stage": 0}, id="zero0"),
        long({"zero_stage": 1}, id="zero1"),
        long({"zero_stage": 2, "verify": "replicas"}, id="zero2"),
        pytest.param({"zero_stage": 3, "verify": "replicas"}, id="zero3"),
        pytest.param({"zero_stage": 3, "zero_shard_size": 1, "verify": "replicas"}, id="copies"),
        long({"zero_stage": 1, "tensor_parallel_size": 2}, id="tensor"),
        long({"zero_stage": 1, "pipeline_parallel_size": 2}, id="pipeline"),
    ],
)
def test_states_are_sharded_over_data_and_context(strategy):
    assert_parity("GPT", 4, {"context_parallel_size": 2, **strategy}, trainer={"gradient_clip_val": 0.5})


@pytest.mark.parametrize(
    ("name", "other"),
    [
        pytest.param("GPT", {"context_parallel_size": 2, "zero_stage": 1}, id="with"),
        pytest.param("GPT", {"zero_stage": 3}, id="without"),
        long("tests.context.test_bytes:Mixed", {"zero_stage": 1}, id="mixer"),
    ],
)
def test_a_checkpoint_loads_with_and_without_the_axis(tmp_path, name, other):
    context = {"context_parallel_size": 2, "zero_stage": 3, "checkpoint_format": "sharded"}
    assert_goes_on(tmp_path / "saved", name, context, 4, other)
