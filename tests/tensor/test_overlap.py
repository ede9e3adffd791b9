"""A weight's gradient is computed while that of its input is summed, and every gradient is what it was without.

Here it is switched on for the CPU, where it is off, as it costs some percent and wins nothing.
"""

import contextlib
import functools
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lightning_3d.axes import group, ring_wire
from lightning_3d.module.undo import UndoStack
from lightning_3d.pipeline.backward import input_half
from lightning_3d.tensor import overlap
from lightning_3d.tensor.apply import apply_tensor
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.plan_module import plan_tensor
from tests import workers
from tests.parity import in_turn, long, silent
from tests.tensor.parity import Ledger, assert_small, in_threads
from tests.zoo import blocks

PRODUCTS = ("attn.c_attn", "attn.qkv", "attn.q_proj", "mlp.0", "mlp.gate_proj", "mlp.c_fc", "lm_head")
"""The first product of each region, which is the one that is deferred."""


def floats():
    return torch.randn(2, 8, 16, requires_grad=True)


def tokens():
    return torch.randint(0, 50, (2, 8))


def square(module, x):
    return module(x).square().mean()


def causal(module, x):
    return module(input_ids=x, labels=x).loss


def sharded(build, loss_of, batch, **options):
    """This rank's shard, and a ledger of what it sends."""
    torch.manual_seed(0)
    module, ledger = build(), Ledger()
    with silent():
        plan = plan_tensor(module, 2, calls=record_calls(module, lambda: loss_of(module, batch)), **options)
    with patch.object(ring_wire, "_machine", lambda: 0):  # sums by the ring do not begin, they are complete
        apply_tensor(module, plan, init_device_mesh("cpu", (2,)), UndoStack(), ledger=ledger)
    return module, ledger


@contextlib.contextmanager
def deferring(on=True):
    overlap.ON_CPU = on
    try:
        yield
    finally:
        overlap.ON_CPU = False


@contextlib.contextmanager
def events_of(module):
    """What happens in a backward, in order."""
    events, real = [], {place: getattr(*place) for place in ((dist, "all_reduce"), (group, "_reduce_scatter"))}
    hooks = [
        parameter.register_hook(lambda grad, name=name: events.append(name.removesuffix(".weight")))
        for name, parameter in module.named_parameters()
        if name.removesuffix(".weight").endswith(PRODUCTS)
    ]

    class Work:
        def __init__(self, work):
            self.work = work

        def wait(self):
            events.append("end")
            return self.work.wait()

    def watched(place, *args, **kwargs):
        work = real[place](*args, **kwargs)
        if not kwargs.get("async_op"):
            return work
        events.append("begin")
        return Work(work)

    for place in real:
        setattr(*place, functools.partial(watched, place))
    try:
        yield events
    finally:
        for place, function in real.items():
            setattr(*place, function)
        for hook in hooks:
            hook.remove()


def order(build, loss_of, batch_of, options):
    torch.manual_seed(1)
    batch = batch_of()
    module, ledger = sharded(build, loss_of, batch, **options)
    with deferring(), events_of(module) as events:
        loss_of(module, batch).backward()
    return events, ledger.calls


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}])
@pytest.mark.parametrize(
    ("build", "loss", "batch", "regions"),
    in_turn(
        [
            (blocks.nano_gpt, square, floats, 4),
            (blocks.llama, causal, tokens, 5),  # four, and the head
            (functools.partial(blocks.gpt2, tie_word_embeddings=False), causal, tokens, 5),
        ],
        2,
    ),
)
def test_a_weight_has_its_gradient_between_the_begin_and_the_end_of_a_sum(build, loss, batch, regions, options):
    for events, calls in workers.run(order, build, loss, batch, options, world=2, group=True):
        assert events[::3] == ["begin"] * regions
        assert events[2::3] == ["end"] * regions
        weights = events[1::3]
        assert len(set(weights)) == regions
        assert all(name.endswith(PRODUCTS) for name in weights)
        if not options and build is blocks.nano_gpt:
            assert calls == ["all_reduce"] * 4 * 2


def whole_step(module, loss_of, batch):
    loss_of(module, batch).backward()


def twice(module, loss_of, batch):
    loss = loss_of(module, batch)
    loss.backward(retain_graph=True)
    loss.backward()


def inputs_first(module, loss_of, batch):
    loss = loss_of(module, batch)
    torch.autograd.grad(loss, batch, retain_graph=True)
    loss.backward()


def accumulated(module, loss_of, batch):
    for part in batch.split(1):
        loss_of(module, part).backward()


def low_precision(module, loss_of, batch):
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(module, batch)
    loss.backward()


def double_precision(module, loss_of, batch):
    loss_of(module.double(), batch.double()).backward()
    module.float()


def recomputed(module, loss_of, batch, reentrant=False):
    checkpoint(loss_of, module, batch, use_reentrant=reentrant).backward()


def recomputed_reentrant(module, loss_of, batch):
    recomputed(module, loss_of, batch, reentrant=True)


def recomputed_inside(module, loss_of, batch):
    """As users write it around a part of a block, between the region's edge and its end."""
    for block in module.blocks:
        inner = block.mlp.forward
        block.mlp.forward = functools.partial(checkpoint, inner, use_reentrant=False)
    loss_of(module, batch).backward()
    for block in module.blocks:
        del block.mlp.forward


def frozen(module, loss_of, batch):
    module.blocks[0].mlp[0].weight.requires_grad_(False)
    loss_of(module, batch).backward()
    module.blocks[0].mlp[0].weight.requires_grad_(True)


def in_place(module, loss_of, batch):
    for block in module.blocks:
        block.mlp[1] = torch.nn.ReLU(inplace=True)
    loss_of(module, batch).backward()


def gradients(step, build, loss_of, batch_of, options):
    """Of a step, deferred and not; and what was sent in each."""
    torch.manual_seed(1)
    batch = batch_of()
    module, ledger = sharded(build, loss_of, batch, **options)
    found, sent = [], []
    for on in (True, False):
        module.zero_grad()
        batch.grad = None
        ledger.calls.clear()
        with deferring(on), events_of(module) as events:
            step(module, loss_of, batch)
        given = {name: p.grad for name, p in module.named_parameters()} | {"batch": batch.grad}
        found.append({n: g.to_local() if isinstance(g, DTensor) else g for n, g in given.items() if g is not None})
        sent.append((list(ledger.calls), "begin" in events))
    return found, sent


def in_halves(module, loss_of, batch):
    """As schedules with zero bubble do."""
    loss, parameters = loss_of(module, batch), list(module.parameters())
    input_half([loss], [None], [batch], parameters).run(parameters)


def hooked(module, loss_of, batch):
    """A region's own code changes the gradient of what entered it, when its sum may have begun."""
    double = lambda _, args: args[0].register_hook(lambda grad: 2 * grad) and None  # noqa: E731
    hooks = [block.mlp[0].register_forward_pre_hook(double) for block in module.blocks]
    loss_of(module, batch).backward()
    for hook in hooks:
        hook.remove()


STEPS = [
    whole_step, twice, inputs_first, accumulated, low_precision, double_precision, recomputed, recomputed_reentrant,
    recomputed_inside, frozen, in_place, in_halves, hooked,
]  # fmt: skip


@pytest.mark.parametrize("step", in_turn(STEPS, 3))
def test_gradients_are_bitwise_those_of_an_undeferred_step(step):
    run_both(step, blocks.nano_gpt, square, floats, {})


# Torch does not cut such a graph in halves, and a recomputation inside of a block does not know of its parts.
@pytest.mark.parametrize("step", in_turn([step for step in STEPS if step not in (recomputed_inside, in_halves)], 3, 1))
def test_gradients_of_parts_of_the_sequence_are_too(step):
    run_both(step, blocks.nano_gpt, square, floats, {"sequence_parallel": True})


@pytest.mark.parametrize(("build", "loss"), [(blocks.llama, causal), (blocks.gpt2, causal)])
@pytest.mark.parametrize("step", [whole_step, *(long(s) for s in (low_precision, recomputed))])
def test_gradients_of_listed_families_are_too(build, loss, step):
    run_both(step, build, loss, tokens, {})


def run_both(step, build, loss, batch, options):
    for (ours, plain), sent in workers.run(gradients, step, build, loss, batch, options, world=2, group=True):
        assert ours.keys() == plain.keys()
        assert [name for name in plain if not torch.equal(ours[name], plain[name])] == []
        assert [deferred for _, deferred in sent] == [True, False]
        if step is not hooked:
            assert sorted(sent[0][0]) == sorted(sent[1][0])


def penalty(module, batch):
    """The loss with the squared gradients of the input and of biases, which all ranks hold whole, in it."""
    with torch.enable_grad():
        x = batch[0].clone().requires_grad_()
        loss = F.mse_loss(module(x), batch[1])
        biases = [p for name, p in module.named_parameters() if name.endswith(("proj.bias", "mlp.2.bias", "ln_1.bias"))]
        slopes = torch.autograd.grad(loss, [x, *biases], create_graph=True)
        return loss + sum(10 * slope.square().sum() for slope in slopes)


@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True}])
@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("build", [blocks.encoder, *(long(b) for b in (blocks.nano_gpt, blocks.packed))])
def test_gradients_of_gradients(build, on, options):
    torch.manual_seed(0)
    batches = [(torch.randn(2, 8, 16), torch.randn(2, 8, 16)) for _ in range(5)]
    with deferring(on), sdpa_kernel(SDPBackend.MATH):
        assert_small(in_threads(build(), penalty, batches, 2, **options)[1])
