"""Experts over the tensor ranks: whole ones on each, or slices of each, with the numbers of one device."""

from dataclasses import replace

import pytest
import torch

from lightning_3d.errors import TensorPlanError
from lightning_3d.tensor import whole_experts
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.plan_module import plan_tensor
from lightning_3d.tools.commands.inspect import render_plan
from tests.parity import assert_parity, assert_same, in_turn, silent, train
from tests.tensor.parity import assert_small, in_threads
from tests.workers import run
from tests.zoo import blocks
from tests.zoo.families import BATCHES, FAMILIES, loss_of
from tests.zoo.registry import members

TRAINED = ("Mixtral", "Qwen3Moe", "DeepseekV3", "Olmoe", "GptOss", "ListedExperts", "SoftExperts")
SHARDED = {"data_parallel_size": 2, "zero_stage": 3}
STAGES = {"pipeline_parallel_size": 2, "num_microbatches": 2}
OTHERS = [
    ("Mixtral", SHARDED),
    ("Mixtral", STAGES),
    ("CalledExperts", SHARDED),
    ("Unreached", SHARDED),
    ("RouterLoss", {}),
    ("BalancedExperts", {}),
]


@pytest.mark.filterwarnings("ignore:These stay unsplit")
@pytest.mark.parametrize(("family", "layout"), [*in_turn([(family, {}) for family in TRAINED], 2), *in_turn(OTHERS, 2)])
def test_twenty_steps_are_those_of_one_device(family, layout):
    layout = {"tensor_parallel_size": 2, "data_parallel_size": 1, "quiet": True, **layout}
    world = 2 * layout["data_parallel_size"] * layout.get("pipeline_parallel_size", 1)
    assert_parity(f"tests.tensor.trained:{family}", world, layout, trainer={"max_epochs": 4}, steps=20, timeout=300)


@pytest.mark.parametrize("layout", [SHARDED, STAGES])
def test_the_routers_loss_is_the_mean_of_its_parts(layout):
    """It is a product of means over tokens: of each data rank as in DDP, and of the full batch in a pipeline."""
    name, trainer = "tests.tensor.trained:RouterLoss", {"max_epochs": 4}
    parts = 1 if layout is STAGES else 2
    wanted = run(train, name, parts, {"data_parallel_size": parts, "quiet": True}, {}, trainer, world=parts)[0]
    layout = {"tensor_parallel_size": 2, "data_parallel_size": 1, "quiet": True, **layout}
    assert_same(run(train, name, 4, layout, {}, trainer, world=4, timeout=300), wanted, 1e-5)


def mixtral(experts=4, top=2, implementation="grouped_mm"):
    values = {**FAMILIES["mixtral"].values, "num_local_experts": experts, "num_experts_per_tok": top}
    model = replace(FAMILIES["mixtral"], values=values).build()
    model.set_experts_implementation(implementation)
    return model


@pytest.mark.parametrize("implementation", ["grouped_mm", "eager", "batched_mm"])
@pytest.mark.parametrize(("experts", "top", "ranks"), [(4, 1, 2), (8, 8, 2), (4, 4, 4), (5, 2, 3)])
def test_routes_to_any_number_of_experts(experts, top, ranks, implementation):
    torch.manual_seed(0)
    module, batches = mixtral(experts, top, implementation), [BATCHES["tokens"]() for _ in range(3)]
    plan, difference = in_threads(module, loss_of, batches, ranks)
    assert_small(difference)
    assert plan.units["model.layers.0"].routes["mlp.experts"].size == experts


def planned(module, batch, size=2, **options):
    with silent():
        calls = record_calls(module, lambda: loss_of(module, batch) if isinstance(batch, dict) else module(batch))
        return plan_tensor(module, size, calls=calls, **options)


def test_wide_slices_are_kept_unless_the_plan_says_experts(monkeypatch):
    monkeypatch.setattr(whole_experts, "THIN", 2)
    module, batch = mixtral(), BATCHES["tokens"]()
    slices = planned(module, batch)
    assert {slices.splits[f"model.layers.0.mlp.experts.{name}"].dim for name in ("gate_up_proj", "down_proj")} == {1, 2}
    asked = planned(module, batch, tensor_plan={"*.experts": "experts"})
    assert asked.splits["model.layers.1.mlp.experts.down_proj"].dim == 0
    assert "mlp.experts: whole experts, 2 of 4" in render_plan(asked, module)
    monkeypatch.undo()
    kept = planned(module, batch, tensor_plan={"*.gate_up_proj": "column:2", "*.down_proj": "row"})
    assert kept.splits["model.layers.1.mlp.experts.down_proj"].dim == 2


@pytest.mark.parametrize(
    ("name", "pattern", "size", "says"),
    [
        ("mixtral", "*.experts", 5, "4 experts are fewer than 5 tensor ranks"),
        ("mixtral", "*.mlp", 2, "mlp.gate.weight is no parameter of experts"),
        ("StackedExperts", "blocks.*", 2, "multiplies all experts at once"),
        ("TopTwo", "*.experts", 2, "whole experts of experts: .*differs|does not run|is off by"),
        ("Balanced", "*.experts", 2, "balance keeps a value beside the results"),
    ],
)
def test_what_cannot_have_whole_experts_is_refused_in_words(name, pattern, size, says):
    kinds = members("odd_blocks")
    module = mixtral() if name == "mixtral" else blocks.Stack(kinds[name].build(), kinds[name].build())
    batch = BATCHES["tokens"]() if name == "mixtral" else torch.randn(2, 8, 16)
    with pytest.raises(TensorPlanError, match=says):
        planned(module, batch, size, tensor_plan={pattern: "experts"})
