"""States of experts: checkpoints of any layout, memory, and bytes of the exchange to the byte."""

import pytest
import torch
from lightning.pytorch import Callback

from lightning_3d import Layout
from lightning_3d.errors import LayoutError, UnsupportedError
from lightning_3d.experts.prove_experts import plan_experts
from lightning_3d.layout import EXPERT_AXIS
from lightning_3d.ranks.mesh import expert_place
from lightning_3d.ranks.shards import local
from lightning_3d.strategy.settings import check_experts
from tests.checkpoint.trainings import train
from tests.dryrun.compare import dry
from tests.experts.trained import Qwen3
from tests.parity import build, make_trainer
from tests.workers import run
from tests.zoo import GPT

MODULE = "tests.experts.trained:GroupedQwen3"
OWNERS = {"expert_parallel_size": 2, "zero_stage": 3}
WHOLE = {"tensor_parallel_size": 2, "tensor_plan": {"*.experts": "experts"}}
"""Whole experts over tensor ranks."""


@pytest.mark.parametrize("format", ["sharded", "full"])
@pytest.mark.parametrize(
    ("saved", "world", "other"),
    [
        (OWNERS, 4, {"expert_parallel_size": 4, "zero_stage": 1}),
        (OWNERS, 4, {"zero_stage": 3}),
        (OWNERS, 4, {"expert_parallel_size": 2, "zero_stage": 0}),
        (OWNERS, 4, WHOLE | {"tensor_parallel_size": 4}),
        (WHOLE, 1, {}),
        (WHOLE, 2, {"expert_parallel_size": 2}),
    ],
    ids=["four", "none", "two", "tensor", "tensor-one", "tensor-owners"],
)
def test_a_checkpoint_loads_with_any_number_of_owners(tmp_path, format, saved, world, other):
    path = str(tmp_path / "saved")
    saved = {"checkpoint_format": format, "quiet": True, **saved}
    (whole,) = run(train, MODULE, 1, None, 5, world=1)
    run(train, MODULE, 4, saved, 3, None, path, world=4)
    for result in run(train, MODULE, world, {"quiet": True, **other}, 5, path, world=world):
        assert result["losses"][-2:] == pytest.approx(whole["losses"][-2:], rel=1e-5)
        for name, weight in whole["weights"].items():
            torch.testing.assert_close(result["weights"][name], weight, rtol=1e-5, atol=1e-5)


def test_sizes_and_messages():
    layout = Layout(expert_parallel_size=2, context_parallel_size=2).fit(8)
    assert str(layout) == "data 4 x tensor 1 x context 2 x pipeline 1, ZeRO 1, experts over 2 ranks"
    assert [expert_place(layout, layout.coordinate(rank)) for rank in (0, 1, 2, 7)] == [(0, 0), (0, 1), (1, 0), (3, 1)]
    with pytest.raises(LayoutError, match="expert_parallel_size=3 does not divide the 8 data and context ranks"):
        check_experts(Layout(expert_parallel_size=3).fit(8), None, None)


@pytest.mark.parametrize(
    "settings", [{"sequence_parallel": True}, {"offload": "all"}, {"schedule": "zbv_zero_bubble", "stages_per_rank": 2}]
)
def test_what_was_not_compared_is_refused(settings):
    layout = Layout(expert_parallel_size=2, data_parallel_size=2, pipeline_parallel_size=2, **settings)
    with pytest.raises(UnsupportedError, match="Leave one of the two out"):
        check_experts(layout, None, None)


def test_a_module_without_experts_is_refused():
    with pytest.raises(
        UnsupportedError, match=r"expert_parallel_size=2: GPT has no experts.*Use expert_parallel_size=1"
    ):
        plan_experts(GPT(), 2)


def test_experts_that_ranks_do_not_divide_are_named():
    with pytest.raises(UnsupportedError, match=r"layers\.0\.mlp.experts: 3 ranks do not divide its 8 experts"):
        plan_experts(Qwen3(), 3)


def test_an_experts_module_whose_tokens_meet_is_refused():
    """Its result depends on the tokens that a rank has, as with a capacity that drops."""
    module = Qwen3()
    for layer in module.model.model.layers:
        experts = layer.mlp.experts
        experts.forward = lambda hidden, index, weights, own=experts.forward: own(
            hidden - hidden.mean(0), index, weights
        )
    with pytest.raises(UnsupportedError, match="its results on several ranks are other ones"):
        plan_experts(module, 2)


@pytest.mark.parametrize(("world", "zero_stage"), [(2, 1), (4, 3)])
def test_a_dry_run_sends_the_closed_form_of_even_routing(world, zero_stage):
    """docs/experts.md: C is 16, E is 4, and each of 2 owners gets half of the rows of 2 experts for each token."""
    strategy = {"expert_parallel_size": 2, "zero_stage": zero_stage}
    report = dry("tests.experts.trained:Batched", f"1x{world}xcpu", strategy, ranks=range(world))
    assert report.errors == ()
    for rank in report.ranks:
        away = 8 // world * 7 * 2 // 2
        assert sum(row.bytes for row in rank.sent if row.axis == EXPERT_AXIS) == 2 * (16 + 2 * away * (2 * 16 * 4 + 4))


def test_a_dry_run_gives_tensor_ranks_an_even_share_of_routes():
    assert dry("tests.experts.trained:Batched", "1x2xcpu", WHOLE, ranks=range(2)).errors == ()


@pytest.mark.parametrize(
    ("recompute", "forwards"), [(None, 1), ("selective", 1), ("full", 2)], ids=["none", "selective", "full"]
)
def test_a_rank_sends_the_closed_form(recompute, forwards):
    """All rows go to the first rank. A selective recomputation sends nothing again, a full one no results."""
    found = run(sent_bytes, {"expert_parallel_size": 2, "recompute": recompute, "quiet": True}, world=2)
    rows = 4 * 7 * 2
    forth, back = rows * (16 * 4 + 4), rows * 16 * 4
    assert found == [2 * (forwards * 16 + back + forth), 2 * (forwards * (16 + forth) + back)]


@pytest.mark.parametrize("recompute", [None, "full"])
def test_experts_that_travel_send_the_closed_form(recompute):
    """Two mixtures of 4 experts, each with two matrices of 8 x 12 and a bias of 12."""
    strategy = {"expert_parallel_size": 2, "recompute": recompute, "quiet": True}
    each = 4 * (2 * 8 * 12 + 12) * 4 // 2
    assert run(sent_bytes, strategy, "Products", world=2) == [2 * each * (3 if recompute else 2)] * 2


def sent_bytes(strategy, kind="Lonely"):
    """Bytes that this rank sends to experts in one step."""
    module, here = build(f"tests.experts.trained:{kind}"), {}

    class Count(Callback):
        def on_train_batch_end(self, trainer, *_):
            here["sent"] = trainer.strategy.run.data_axis.ledger.bytes(EXPERT_AXIS)

    trainer = make_trainer(2, strategy, max_steps=1, callbacks=[Count()])
    trainer.fit(module)
    return here["sent"]


@pytest.mark.parametrize("strategy", [{"expert_parallel_size": 2}, WHOLE], ids=["data", "tensor"])
@pytest.mark.parametrize(("world", "zero_stage"), [(2, 0), (4, 3)])
def test_a_rank_has_its_share_of_the_experts_to_the_byte(world, zero_stage, strategy):
    replicas = world // 2 if zero_stage == 3 else 1
    for held in run(held_bytes, world, {"zero_stage": zero_stage, "quiet": True, **strategy}, world=world):
        assert held == 2 * 4 * (2 * 12 * 16 + 16 * 12) * 4 // 2 // replicas


def test_a_rank_has_its_share_of_experts_that_travel_to_the_byte():
    for held in run(held_bytes, 2, {"expert_parallel_size": 2, "quiet": True}, "Products", world=2):
        assert held == 2 * 4 * (2 * 8 * 12 + 12) * 4 // 2


def held_bytes(world, strategy, kind="Mixtral"):
    """Bytes of experts on this rank while it trains."""
    module, here = build(f"tests.experts.trained:{kind}"), {}

    class Count(Callback):
        def on_train_batch_end(self, trainer, *_):
            names = ("experts", ".up", ".down", "blocks.0.bias", "blocks.1.bias")
            own = (p for name, p in module.named_parameters() if any(each in name for each in names))
            here["held"] = sum(local(p).untyped_storage().nbytes() for p in own)

    trainer = make_trainer(world, strategy, max_steps=1, callbacks=[Count()])
    trainer.fit(module)
    return here["held"]
