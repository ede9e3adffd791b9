"""Calls that the proof did not see: whole, with the outputs and gradients of one device."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from lightning_3d.errors import TensorPlanError
from lightning_3d.module.undo import UndoStack
from lightning_3d.ranks.shards import local
from lightning_3d.tensor.apply import apply_tensor
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.geometry import assemble
from lightning_3d.tensor.patch import local_value, patch_unit
from lightning_3d.tensor.plan_module import plan_tensor
from lightning_3d.tensor.sample import form_of
from lightning_3d.tensor.scratch import shard_copy
from lightning_3d.tensor.simulate import run_shards
from tests.parity import caught_warnings
from tests.workers import on_ranks


class Stateful(nn.Module):
    """Takes a state as wide as its hidden dimension, in some calls."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.width = nn.Linear(16, 32), nn.Linear(32, 16), 32

    def forward(self, x, state=None):
        h = self.up(x).view(*x.shape[:-1], self.width)
        return self.down(h if state is None else h * state)


class Switched(nn.Module):
    """Mixes its channels, where an attribute or the kind of a part says so."""

    mode = "alone"

    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)
        self.share, self.calls, self.kept, self.ready = 0.0, 0, 0.0, False
        self.later, self.first = lambda h: h, 4

    def forward(self, x):
        self.calls += 1
        h = self.act(self.up(x))
        if self.calls >= self.first:
            h = self.later(h)
        self.kept, self.ready = x.mean(-1), True
        share = 0.5 if self.mode == "mixed" else self.share
        return self.down(h - share * h.mean(-1, keepdim=True))


class Checkpointed(Stateful):
    """As Hugging Face's `gradient_checkpointing_enable()` does it: within the block's own forward."""

    reentrant = True

    def __init__(self, rate=0.0):
        super().__init__()
        self.drop, self.repeats = nn.Dropout(rate), 1

    def forward(self, x, state=None):
        def inner(x):
            h = self.drop(self.up(x).view(*x.shape[:-1], self.width))
            return self.down(self.drop(h if state is None else h * state))

        return checkpoint(inner, x, use_reentrant=self.reentrant) if self.repeats else inner(x)


class CheckpointedSaved(Checkpointed):
    reentrant = False


def planned(block, run):
    module = nn.Sequential(nn.Identity(), nn.ModuleDict({"block": nn.ModuleList([block])}))
    return plan_tensor(module, 2, calls=record_calls(module, run)).units["1.block.0"]


def divided(kind):
    """A seeded block, its input, and the plan that divides it."""
    torch.manual_seed(0)
    block, x = kind(), torch.randn(2, 8, 16)
    plan = planned(block, lambda: block(x))
    assert plan.splits
    return block, x, plan


def in_shards(block, plan, call):
    """`call(shard)` on two ranks; results, and gradients in one piece."""

    def job(axis):
        shard = shard_copy(block, lambda name, value: local_value(plan, name, value, axis.rank))
        with UndoStack() as undo:
            patch_unit(shard, plan, axis, undo)
            result = call(shard)
            result.square().sum().backward()
            grads = {name: p.grad for name, p in shard.named_parameters()}
        return result.detach(), grads

    (first, ours), (second, theirs) = run_shards(2, job)
    assert torch.equal(first, second)
    split = {name: assemble([ours[name], theirs[name]], way) for name, way in plan.splits.items()}
    return first, {**ours, **split}


def assert_like_whole(block, plan, call):
    expected = call(reference := copy.deepcopy(block))
    expected.square().sum().backward()
    found, grads = in_shards(block, plan, call)
    torch.testing.assert_close(found, expected.detach())
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad)


@pytest.mark.filterwarnings("ignore:Stateful is called in a way")
@pytest.mark.parametrize("state", [torch.rand(32), torch.rand(2, 1, 32), None])
def test_another_form_of_call_computes_the_same(state):
    block, x, plan = divided(Stateful)
    assert_like_whole(block, plan, lambda each: each(x, state))


@pytest.mark.parametrize(("name", "value"), [("mode", "mixed"), ("share", 0.5), ("act", nn.Softmax(-1)), ("calls", 7)])
def test_another_setting_of_a_block_is_named(name, value):
    """A hook changes it after some steps, say. Counts, and what the block sets itself, are no settings."""
    block, x, plan = divided(Switched)

    def changed(block):
        block(x)
        setattr(block, name, value)
        return block(x)

    with caught_warnings() as seen:
        in_shards(block, plan, changed)
    said = [text for text in seen if "changed between two calls" in text]
    assert bool(said) == (name != "calls")
    assert all(f": {'the kinds of its parts' if name == 'act' else name}. " in each for each in said)


ASIDE = []


@pytest.mark.parametrize(
    ("later", "said"),
    [
        (lambda h: h / h.norm(dim=-1, keepdim=True), "(Div, LinalgVectorNorm)"),
        (lambda h: ASIDE.append(h.pow(2).mean()) or h, "(2 beside its result)"),
        (lambda h: h.transpose(0, 1).contiguous().transpose(0, 1), ""),
    ],
)
def test_code_of_a_block_that_begins_in_a_later_step_is_named(later, said):
    """A batch of another shape, and a weight that begins to train, are no other code."""
    block, x, plan = divided(Switched)
    block.up.weight.requires_grad_(False)
    block.later, block.calls = later, 0

    def steps(block):
        for each in (x, x[:1], x[:, :4]):
            block(each)
        block.up.weight.requires_grad_(True)
        block.calls = 0
        with caught_warnings() as early:
            block(x)
        assert not early
        block.calls = 4
        return block(x)

    with caught_warnings() as seen:
        in_shards(block, plan, steps)
    seen = [text for text in seen if "computes by operations that its first steps did not show" in text]
    assert bool(seen) == bool(said)
    assert all(said in text for text in seen)


class Scan(Stateful):
    """A state that decays from step to step, written into its place, as linear attention has it."""

    def forward(self, x):
        h = self.up(x).sigmoid()
        states, state = torch.zeros_like(h), torch.zeros_like(h[:, 0])
        for step in range(x.shape[1]):
            state = 0.9 * state + h[:, step]
            states[:, step] = state.tanh()
        return self.down(states)


def test_a_longer_loop_is_no_other_code():
    block, x = Scan(), torch.randn(2, 8, 16)
    plan = planned(block, lambda: block(x))
    assert plan.splits
    with caught_warnings() as seen:
        in_shards(block, plan, lambda shard: [shard(x[:, :length]) for length in (4, 6, 8)][-1])
    assert not [text for text in seen if "its first steps did not show" in text]


@pytest.mark.filterwarnings("ignore:Checkpointed.* is called in a way")
@pytest.mark.parametrize("kind", [Checkpointed, CheckpointedSaved])
def test_a_checkpoint_inside_of_a_block_repeats_such_a_call_whole(kind):
    torch.manual_seed(0)
    block, x, state = kind(), torch.randn(2, 8, 16, requires_grad=True), torch.rand(32)
    block.repeats = 0  # nothing is seen through a reentrant one, and such a block is not divided
    plan = planned(block, lambda: block(x))
    assert plan.splits
    block.repeats = 1
    assert_like_whole(block, plan, lambda each: each(x.detach().requires_grad_(), state))


@pytest.mark.parametrize("kind", [Checkpointed, CheckpointedSaved])
@on_ranks(2)
def test_a_checkpoint_inside_of_a_block_repeats_its_dropout_on_shards(kind):
    """Gradients of blocks in shards with dropout, without their checkpoints and with them."""
    torch.manual_seed(0)
    module, x = nn.ModuleDict({"blocks": nn.ModuleList([kind(0.5), kind(0.5)])}), torch.randn(2, 8, 16)

    def forward(repeats):
        torch.manual_seed(1)
        h = x.clone().requires_grad_()
        for block in module["blocks"]:
            block.repeats = int(repeats)
            h = block(h) + h
        return h

    forward(False)  # from now on without a checkpoint, through which nothing is seen
    calls = record_calls(module, lambda: forward(False))
    plan = plan_tensor(module, 2, calls=calls)
    assert any(plan.units["blocks.0"].dropouts)
    apply_tensor(module, plan, init_device_mesh("cpu", (2,)), UndoStack())
    found = []
    for repeats in (False, True):
        module.zero_grad()
        forward(repeats).square().sum().backward()
        found.append({name: local(p.grad) for name, p in module.named_parameters()})
    assert [name for name, grad in found[0].items() if not torch.equal(grad, found[1][name])] == []


class Repeat(torch.autograd.Function):
    """A checkpoint of a user's own."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.function = function
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            torch.autograd.backward(ctx.function(x), grad)
        return x.grad, None


class Own(Stateful):
    repeats = False

    def forward(self, x, state=None):
        forward = super().forward
        return Repeat.apply(x, lambda x: forward(x, state)) if self.repeats else forward(x, state)


@on_ranks(2)
def test_a_checkpoint_of_a_users_own_is_refused_where_it_would_compute_with_shards():
    module, x = nn.ModuleDict({"blocks": nn.ModuleList([Own()])}), torch.randn(2, 8, 16)
    block = module["blocks"][0]
    plan = plan_tensor(module, 2, calls=record_calls(module, lambda: block(x)))
    apply_tensor(module, plan, init_device_mesh("cpu", (2,)), UndoStack())
    block.repeats = 1
    with pytest.warns(UserWarning, match="Own is called in a way"):
        out = block(x.requires_grad_(), torch.rand(32))
    with pytest.raises(TensorPlanError, match=r"computes blocks\.0\.up again"):
        out.sum().backward()


def test_it_is_said_once_and_shards_go_on_as_before():
    block, x, state = Stateful(), torch.randn(2, 8, 16), torch.rand(32)
    plan = planned(block, lambda: block(x))
    with pytest.warns(UserWarning, match="Stateful is called in a way that the recorded run did not show"):
        in_shards(block, plan, lambda shard: shard(x, state) + shard(x))
    found, _ = in_shards(block, plan, lambda shard: shard(x))  # without a warning, which would be an error
    torch.testing.assert_close(found, block(x).detach())


@pytest.mark.filterwarnings("ignore:Stateful is called in a way")
def test_what_lies_over_the_forward_of_a_block_stays_there():
    block, x, state = Stateful(), torch.randn(2, 8, 16), torch.rand(32)
    plan = planned(block, lambda: block(x))
    calls = []

    def call(shard):
        forward = shard.forward
        shard.forward = lambda *args: calls.append(1) or forward(*args)  # as a pipeline does once tensors are split
        result = shard(x, state) + shard(x)
        del shard.forward
        return result

    in_shards(block, plan, call)
    assert len(calls) == 4


def test_forms_that_the_plan_fits_are_proven_too():
    block, x = Stateful(), torch.randn(2, 8, 16)
    plan = planned(block, lambda: (block(x), block(x, True)))
    assert (True, form_of(((x, True), {}))) in plan.forms


def test_a_form_that_the_plan_does_not_fit_is_left_out_of_it():
    block, x = Stateful(), torch.randn(2, 8, 16)
    torch.manual_seed(0)
    # wide in a way that shards of it are not: the state would have to be divided too
    plan = planned(block, lambda: (block(x), block(x, torch.arange(32).remainder(2).bool())))
    assert plan.splits
    assert [form for _, form in plan.forms] == [form_of(((x,), {}))] * len(plan.forms)


def test_forms_tell_structure_apart_and_not_sizes():
    x, y = torch.rand(2, 3), torch.rand(4, 5)
    assert form_of((x, {"mask": None, "flag": True})) == form_of((y, {"mask": None, "flag": True}))
    assert form_of((x, {"mask": None})) != form_of((x, {"mask": x}))
    assert form_of((x, True)) != form_of((x, False))
    assert form_of((x, 3)) == form_of((x, 4))
    assert form_of(x.long()) != form_of(x)
    assert form_of(x[0]) != form_of(x)
