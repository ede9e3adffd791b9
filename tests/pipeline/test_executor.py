"""How a step runs: what is kept in memory, and how long ranks wait."""

import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import nn

from lightning_3d.layout import stage_ranks
from lightning_3d.pipeline import executor, prove, traced_tensor, wire
from lightning_3d.pipeline.cut_module import StepContext
from lightning_3d.pipeline.exchange import Ties
from lightning_3d.pipeline.schedule import actions, stages_per_rank
from lightning_3d.pipeline.traced_tensor import StepTape
from tests.parity import check
from tests.pipeline.loop import cut
from tests.workers import run
from tests.zoo.batchless import GPT, gpt_batch

SCHEDULES = [
    "gpipe", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipev", "loopedbfs",
]  # fmt: skip


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
    whole = sum(parameter.numel() for parameter in module.parameters())
    pipeline = cut(module, num_microbatches=microbatches)
    counts = {"flights": 0, "arriving": 0}
    forward = executor.Execution._forward

    def counted(self, stage, index):
        counts["arriving"] = max(counts["arriving"], len(self.arriving))
        forward(self, stage, index)
        counts["flights"] = max(counts["flights"], len(self.in_flight))

    executor.Execution._forward = counted
    try:
        pipeline.training_step(gpt_batch(rows=16), 0)
    finally:
        executor.Execution._forward = forward
    here = [parameter for parameter in module.parameters() if not parameter.is_meta]
    held = sum(parameter.untyped_storage().nbytes() // 4 for parameter in here)
    return counts, held / whole, len(here), sum(p.grad is not None for p in module.parameters())


def test_memory_does_not_grow_with_the_microbatches():
    for few, many in zip(run(memory, 4, world=2, group=True), run(memory, 16, world=2, group=True), strict=True):
        assert few == many
        assert many[0]["flights"] <= 2
        assert many[0]["arriving"] <= 2


def test_absent_parameters_take_no_memory():
    (_, first, here, _), (_, second, _, _) = run(memory, 4, world=2, group=True)
    tied = GPT(layers=2).lm_head.weight.numel() / sum(parameter.numel() for parameter in GPT(layers=2).parameters())
    assert first + second == pytest.approx(1 + tied)
    assert here < len(list(GPT(layers=2).parameters()))


class Between(LightningModule):
    """Adds to what its blocks return, in place where it `writes`."""

    def __init__(self, writes=True):
        super().__init__()
        self.blocks, self.writes = nn.ModuleList(nn.Linear(4, 4) for _ in range(4)), writes

    def training_step(self, batch, batch_idx):
        for block in self.blocks:
            batch = block(batch)
            batch = batch.add_(1.0) if self.writes else batch + 1.0
        return batch.pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def between():
    torch.manual_seed(1)
    return Between(), list(torch.randn(3, 8, 4))


def test_code_between_blocks_may_write_into_what_other_stages_computed():
    check(between, 2, {"num_microbatches": 4})


def placeholders():
    """Placeholders for blocks of other stages after each of two steps of four microbatches."""
    module = Between(writes=False)
    pipeline = cut(module, num_microbatches=4)
    found = []
    for _ in range(2):
        pipeline.training_step(torch.ones(8, 4), 0)
        (trace,) = pipeline.traces.values()
        found.append([each.data_ptr() for each in trace.zeros.values()])
    return found


def test_zeros_for_blocks_of_other_stages_are_made_once():
    ranks = run(placeholders, world=2, group=True)
    assert all(first == second for first, second in ranks)
    assert [len(first) for first, _ in ranks] == [0, 1]  # the first stage is cut before it would need any


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad, None


def test_functions_of_autograd_in_blocks_are_not_looked_into(monkeypatch):
    def no_walk(value):
        raise AssertionError("walks through containers")

    outside = torch.autograd.Function.__dict__["apply"]
    with StepTape():
        assert torch.autograd.Function.__dict__["apply"] is not outside
        monkeypatch.setattr(traced_tensor, "leaves", no_walk)
        result = _Twice.apply(torch.ones(2, requires_grad=True), 2)
        assert type(result) is torch.Tensor
        with pytest.raises(AssertionError, match="walks"):
            _Twice.apply(torch.ones(2, requires_grad=True), [2])
    assert torch.autograd.Function.__dict__["apply"] is outside


PAUSE = 0.1
"""Seconds that a block takes for its forward, as long for its input's gradient, as long for its weight's."""


class _Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward):
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(PAUSE)
        return grad, None


class Sleeper(nn.Module):
    """The paths to the input and to the weight sleep apart, so that each half of a split backward takes its time."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return _Pause.apply(x, PAUSE) * _Pause.apply(self.weight, 0.0)


class Sleepers(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.Sequential(*(Sleeper() for _ in range(blocks)))
        self.start = nn.Parameter(torch.zeros(4))

    def training_step(self, batch, batch_idx):
        return self.blocks(batch + self.start).mean()


class PendingCopies:
    """How long this rank waits for others while it runs its actions, and when it is through with them."""

    def __init__(self):
        self.seconds = self.ended = 0.0
        self.replaced = [(wire.Receipt, "wait"), (wire.Wire, "finish"), (executor.Execution, "run")]
        self.before = [getattr(owner, name) for owner, name in self.replaced]

    def __enter__(self):
        wait, finish, run = self.before
        wire.Receipt.wait = lambda receipt: self.timed(wait, receipt)
        wire.Wire.finish = lambda each: self.timed(finish, each)
        executor.Execution.run = lambda execution, order: self.run(run, execution, order)
        return self

    def timed(self, function, *args):
        begun = time.perf_counter()
        result = function(*args)
        self.seconds += time.perf_counter() - begun
        return result

    def run(self, function, *args):
        function(*args)
        self.ended = time.perf_counter()

    def __exit__(self, *_):
        for (owner, name), before in zip(self.replaced, self.before, strict=True):
            setattr(owner, name, before)


def idle(schedule, microbatches):
    """The idle time of this rank in a step, and the length of the step: the better of two tries."""
    per_rank = 1 if schedule in ("gpipe", "1f1b") else 2
    pipeline = cut(Sleepers(P * per_rank), schedule, per_rank, num_microbatches=microbatches)
    batch = torch.randn(microbatches, 4)
    prove.trace_of(StepContext(pipeline, "training_step", (batch[:1], 0), 0))
    return min(_one_step(pipeline, batch) for _ in range(2))


def _one_step(pipeline, batch):
    dist.barrier()
    begun = time.perf_counter()
    with PendingCopies() as waiting:
        pipeline.training_step(batch, 0)
    times = [None] * dist.get_world_size()
    dist.all_gather_object(times, (waiting.ended - begun, waiting.seconds))
    step = max(own for own, _ in times)
    return sum(step - own + waited for own, waited in times) / len(times) / step


P, M = 4, 8
CLOSED = {
    "gpipe": 3 * (P - 1),
    "1f1b": 3 * (P - 1),
    "interleaved_1f1b": 3 * (P - 1) / 2,
    "loopedbfs": 3 * (P - 1) / 2,
    "interleaved_zero_bubble": (P - 1) / 2,
    "zbv_zero_bubble": (P - 1) / 2,
    "dualpipev": (P - 1) / 2,
}
"""Idle time per step, in units of a rank's forward of a microbatch, where the three passes take equally long: a ramp of
`F + B + W`, which more stages per rank divide; with a split backward `F + B - W`; with V-shaped placement `F`, as ranks
start one after the other but end together. Of 24 units of work."""


@pytest.mark.long
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_idle_share_is_the_closed_form(schedule):
    expected = CLOSED[schedule] / (3 * M + CLOSED[schedule])
    measured = run(idle, schedule, M, world=P, group=True, timeout=120)
    assert max(measured) == pytest.approx(expected, rel=0.1)


def test_each_of_three_ranks_adds_the_gradients_of_a_tie_in_the_order_of_ranks():
    """Other orders would round otherwise, and the copies of one weight would part bit by bit."""
    grads, sums = [torch.tensor([1e8]), torch.tensor([-1e8]), torch.tensor([1.0])], []
    for rank in range(3):

        def swap(kind, sent, buffers, tag):
            for other, buffer in buffers.items():
                buffer.copy_(grads[other])
            return lambda: None

        ties = object.__new__(Ties)
        ties.wire = SimpleNamespace(
            rank=rank, naming=lambda text: nullcontext(), peers=SimpleNamespace(begin_swap=swap)
        )
        sums.append(ties._exchange((0, 1, 2), grads[rank]).item())
    assert sums == [1.0, 1.0, 1.0]


def test_a_tie_without_a_gradient_on_any_rank_has_none():
    ties, tensors = object.__new__(Ties), {"some": torch.zeros(1), "none": torch.zeros(1)}
    ties.ties, ties.grad_holder = [SimpleNamespace(name=name) for name in tensors], tensors.__getitem__
    ties._present = SimpleNamespace(wait=lambda: [1, 0])
    (absent,) = ties._without_gradient([*tensors.values()])
    assert absent is tensors["none"]
