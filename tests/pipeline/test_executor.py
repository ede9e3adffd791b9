"""How a step runs: what is kept in memory, and how long ranks wait."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from lightning_3d.pipeline import executor
from lightning_3d.pipeline.runner import Pipeline
from lightning_3d.pipeline.schedule import actions, stage_ranks, stages_per_rank
from lightning_3d.pipeline.split import apply_split, plan_split
from tests.pipeline.models import GPT, gpt_batch
from tests.workers import run

SCHEDULES = [
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "interleaved_zero_bubble",
    "zbv_zero_bubble",
    "dualpipev",
    "loopedbfs",
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
@pytest.mark.filterwarnings("ignore:schedule=")
def test_every_order_is_complete(schedule, ranks, microbatches):
    """Each stage does every microbatch forward once and backward once, whole or in two halves; messages match."""
    per_rank = stages_per_rank(schedule, 1 if schedule in ("gpipe", "1f1b") else 2)
    placement = stage_ranks(schedule, ranks, per_rank)
    order = actions(schedule, schedule, ranks, per_rank, microbatches)
    done = [(action.kind, action.stage, action.microbatch) for rank in order for action in rank]
    assert len(set(done)) == len(done)
    for stage, rank in enumerate(placement):
        mine = [action for action in order[rank] if action.stage == stage]
        for index in range(microbatches):
            kinds = [action.kind for action in mine if action.microbatch == index and len(action.kind) == 1]
            assert kinds in (["F", "B"], ["F", "I", "W"])
    for kind, other, step in [("SEND_F", "RECV_F", 1), ("SEND_B", "RECV_B", -1)]:
        sent = {(stage + step, index) for name, stage, index in done if name == kind}
        assert sent == {(stage, index) for name, stage, index in done if name == other}


def test_one_forward_one_backward_holds_at_most_one_microbatch_per_stage_behind():
    for rank, order in enumerate(actions("1f1b", "1f1b", 4, 1, 16)):
        held, most = 0, 0
        for action in order:
            held += {"F": 1, "B": -1}.get(action.kind, 0)
            most = max(most, held)
        assert most == 4 - rank


def memory(microbatches):
    torch.manual_seed(1)
    module = GPT(layers=2)
    split = plan_split(module, None, 2)
    whole = sum(parameter.numel() for parameter in module.parameters())
    applied = apply_split(module, split, [dist.get_rank()])
    module.log = lambda *args, **kwargs: None
    pipeline = Pipeline(module, split, dist.group.WORLD, num_microbatches=microbatches)
    counts = {"flights": 0, "arriving": 0}
    forward = executor.Execution._forward

    def counted(self, stage, index):
        counts["arriving"] = max(counts["arriving"], len(self.arriving))
        forward(self, stage, index)
        counts["flights"] = max(counts["flights"], len(self.flights))

    executor.Execution._forward = counted
    try:
        pipeline.training_step(gpt_batch(rows=16), 0)
    finally:
        executor.Execution._forward = forward
    held = sum(parameter.untyped_storage().nbytes() // 4 for parameter in module.parameters() if not parameter.is_meta)
    return counts, held / whole, len(applied.absent), len(pipeline.stash)


def test_memory_does_not_grow_with_the_microbatches():
    for few, many in zip(run(memory, 4, world=2, group=True), run(memory, 16, world=2, group=True), strict=True):
        assert few == many
        assert many[0]["flights"] <= 2
        assert many[0]["arriving"] <= 2


def test_absent_parameters_take_no_memory():
    (_, first, absent, _), (_, second, _, _) = run(memory, 4, world=2, group=True)
    tied = GPT(layers=2).lm_head.weight.numel() / sum(parameter.numel() for parameter in GPT(layers=2).parameters())
    assert first + second == pytest.approx(1 + tied)
    assert absent > 0


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        time.sleep(0.04)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        time.sleep(0.08)
        return grad, grad.sum(0)


class Sleeper(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return _Sleep.apply(x, self.weight)


class Sleepers(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.Sequential(*(Sleeper() for _ in range(blocks)))

    def training_step(self, batch, batch_idx):
        return self.blocks(batch).mean()


def idle(schedule, microbatches, per_rank):
    group = dist.group.WORLD
    module = Sleepers(group.size() * per_rank)
    split = plan_split(module, None, group.size() * per_rank)
    placement = stage_ranks(schedule, group.size(), per_rank)
    apply_split(module, split, [stage for stage, rank in enumerate(placement) if rank == group.rank()])
    pipeline = Pipeline(module, split, group, schedule=schedule, num_microbatches=microbatches)
    batch = torch.randn(microbatches, 4)
    pipeline.training_step(batch, 0)
    times = []
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        pipeline.training_step(batch, 0)
        times.append(time.perf_counter() - start)
    return 1 - microbatches * per_rank * 0.12 / min(times)


@pytest.mark.long
@pytest.mark.parametrize(
    ("schedule", "per_rank"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("loopedbfs", 2)]
)
def test_idle_share_is_the_closed_form(schedule, per_rank):
    ranks, microbatches = 4, 8
    expected = (ranks - 1) / (per_rank * microbatches + ranks - 1)
    measured = run(idle, schedule, microbatches, per_rank, world=ranks, group=True)
    assert max(measured) == pytest.approx(expected, rel=0.1, abs=0.03)
