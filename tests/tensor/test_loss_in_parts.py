"""Large logits are computed in parts by the loss, and whole by anything else."""

import gc
import itertools
import traceback
import weakref
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_3d.errors import UnsupportedError
from lightning_3d.module.forward import ForwardLayer, Layer, add_layer
from lightning_3d.module.undo import UndoStack
from lightning_3d.tensor import cross_entropy, late_operations, late_product
from lightning_3d.tensor.geometry import TensorSplit, assemble, local_part
from lightning_3d.tensor.late_head import patch_heads
from lightning_3d.tensor.late_tensor import LateTensor
from lightning_3d.tensor.simulate import run_shards
from lightning_3d.tensor.vocabulary import patch_vocabulary
from tests.activations.watching import peaks
from tests.parity import assert_same, long, reference, train
from tests.workers import run
from tests.zoo.base import Base
from tests.zoo.language import GPT

CLASSES, WIDTH = 11, 4


@pytest.fixture
def small(monkeypatch):
    """Each head is large, and a part is two rows of logits."""
    monkeypatch.setattr(late_product, "LARGE", 0)
    monkeypatch.setattr(cross_entropy, "PART", 2 * CLASSES * 4)


@pytest.fixture
def target():
    return torch.randint(0, CLASSES, (3, 5), generator=torch.Generator().manual_seed(1))


def made(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.ModuleDict({"head": nn.Linear(WIDTH, CLASSES, dtype=dtype)}), torch.randn(3, 5, WIDTH, dtype=dtype)


def outcome(module, x, loss):
    """Values, and gradients of the rows, the weight and the bias."""
    x, head = x.clone().requires_grad_(), module["head"]
    module.zero_grad()
    logits = head(x)
    values = loss(logits)
    values.sum().backward()
    return (values.detach(), x.grad, head.weight.grad, head.bias.grad), logits


@contextmanager
def late_logits(module, *blocks):
    """Let the heads of `module` give late logits inside."""
    with UndoStack() as undo:
        patch_heads(module, blocks, undo)
        yield


def in_parts(module, x, loss):
    with late_logits(module):
        found, logits = outcome(module, x, loss)
    assert type(logits) is LateTensor
    return found, logits.full is not None


def same_in_parts(loss, dtype=torch.float32, **tolerances):
    """Whether the loss computed all logits. Its numbers are those without us."""
    module, x = made(dtype)
    found, full = in_parts(module, x, loss)
    torch.testing.assert_close(found, outcome(module, x, loss)[0], **tolerances)
    return full


def divided(module, x, loss, ranks=2):
    """The outcome with classes that ranks divide, put together."""
    weights = TensorSplit.even(0, CLASSES, ranks)

    def job(axis):
        head = nn.Linear(WIDTH, CLASSES)
        head.weight = nn.Parameter(local_part(module["head"].weight.detach(), weights, axis.rank).clone())
        head.bias = nn.Parameter(local_part(module["head"].bias.detach(), weights, axis.rank).clone())
        patch_vocabulary(head, {"weight": weights}, axis, UndoStack())
        return outcome(nn.ModuleDict({"head": head}), x, loss)[0]

    values, rows, weight, bias = zip(*run_shards(ranks, job), strict=True)
    return values[1], rows[1], assemble(list(weight), weights), assemble(list(bias), weights)


@pytest.mark.parametrize(
    ("reduction", "smoothing", "weighted", "ignored"),
    list(itertools.product(["mean", "sum", "none"], [0.0, 0.1], [False, True], [-100, 3])),
)
def test_values_and_gradients_are_those_of_all_logits(small, target, reduction, smoothing, weighted, ignored):
    """In fp64, so that a wrong term cannot hide in rounding."""
    weight = torch.arange(1.0, CLASSES + 1, dtype=torch.float64) if weighted else None
    target[0, :2] = ignored

    def loss(logits):
        return F.cross_entropy(
            logits.transpose(1, 2), target, weight=weight, ignore_index=ignored, reduction=reduction,
            label_smoothing=smoothing,
        ) * 3.0  # fmt: skip

    assert not same_in_parts(loss, torch.float64, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("reduction", "smoothing"), [("mean", 0.0), ("mean", 0.1), ("none", 0.0), ("none", 0.1)])
def test_divided_classes_in_parts(small, target, reduction, smoothing):
    module, x = made()

    def loss(logits):
        return F.cross_entropy(
            logits.view(-1, CLASSES), target.view(-1), reduction=reduction, label_smoothing=smoothing
        )

    calls = []
    original = cross_entropy._Parts.backward
    cross_entropy._Parts.backward = staticmethod(lambda *args: (calls.append(1), original(*args))[1])
    try:
        found = divided(module, x, loss)
    finally:
        cross_entropy._Parts.backward = staticmethod(original)
    assert len(calls) == 2
    torch.testing.assert_close(found, outcome(module, x, loss)[0])


@pytest.mark.parametrize(
    "lead",
    [
        lambda x: (x.float().reshape(-1, x.size(-1)), slice(None)),
        lambda x: (x[..., :-1, :].contiguous().view(-1, CLASSES), (slice(None), slice(1, None))),
        lambda x: (x[torch.arange(15).view(3, 5) % 3 > 0], torch.arange(15).view(3, 5) % 3 > 0),
        lambda x: (x.permute(0, 2, 1), slice(None)),
        lambda x: ((x / 2.0).clone().view(15, -1).double(), slice(None)),
    ],
)
def test_what_leads_to_the_loss_computes_nothing(small, target, lead):
    def loss(logits):
        scores, kept = lead(logits)
        labels = target[kept]
        return nn.CrossEntropyLoss()(scores, labels if scores.dim() > 2 else labels.reshape(-1))

    assert not same_in_parts(loss)


@pytest.mark.parametrize(
    "other",
    [
        lambda x, y: x.softmax(-1).square(),
        lambda x, y: F.nll_loss(x.log_softmax(-1).view(-1, CLASSES), y.view(-1)),
        lambda x, y: F.cross_entropy(x.view(-1, CLASSES), F.one_hot(y.view(-1), CLASSES).float()),
        lambda x, y: x[..., 3] + x.float()[..., 2],
    ],
)
def test_anything_else_sees_all_logits(small, target, other):
    same_in_parts(lambda logits: other(logits, target), rtol=0, atol=0)


def test_a_metric_without_gradients_may_come_before_the_loss(small, target):
    def loss(logits):
        with torch.no_grad():
            assert logits.argmax(-1).shape == target.shape
        return F.cross_entropy(logits.view(-1, CLASSES), target.view(-1))

    assert same_in_parts(loss, rtol=0, atol=0)


def test_the_same_of_shards(target):
    """Shards that a rank without gradients gathers first."""
    split, logits = TensorSplit.even(1, CLASSES, 2), torch.randn(15, CLASSES)

    def job(axis):
        part = local_part(logits, split, axis.rank).clone().requires_grad_()
        late = LateTensor.of(part, split, axis)
        with torch.no_grad():
            late.argmax(-1)
        F.cross_entropy(late, target.view(-1)).backward()
        return part.grad

    leaf = logits.clone().requires_grad_()
    F.cross_entropy(leaf, target.view(-1)).backward()
    torch.testing.assert_close(assemble(run_shards(2, job), split), leaf.grad)


def test_a_gradient_has_a_gradient(small, target):
    module, x = made(torch.float64)

    def penalty(logits):
        loss = F.cross_entropy(logits.view(-1, CLASSES), target.view(-1))
        (slope,) = torch.autograd.grad(loss, module["head"].weight, create_graph=True)
        return loss + slope.square().sum()

    found, _ = in_parts(module, x, penalty)
    torch.testing.assert_close(found, outcome(module, x, penalty)[0], rtol=1e-10, atol=1e-12)


def test_autocast_casts_what_it_would(small, target):
    module, x = made()

    def loss(logits):
        assert logits.dtype == torch.bfloat16
        return F.cross_entropy(logits.view(-1, CLASSES), target.view(-1))

    with torch.autocast("cpu", torch.bfloat16):
        found, _ = in_parts(module, x, loss)
        wanted, _ = outcome(module, x, loss)
    assert found[0].dtype == wanted[0].dtype == torch.float32
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-3)  # bf16 sums of gradients


def test_a_large_mean_in_half_precision_does_not_overflow(small):
    """Losses of 20 in 8000 rows add up to more than fp16 has."""
    head = nn.ModuleDict({"head": nn.Linear(WIDTH, CLASSES, dtype=torch.float16)})
    with torch.no_grad():
        head["head"].weight.zero_()
        head["head"].bias.copy_(torch.tensor([20.0] + [0.0] * (CLASSES - 1)))
    cross_entropy.PART = 2**20
    found, _ = in_parts(
        head, torch.ones(8000, WIDTH, dtype=torch.float16), lambda x: F.cross_entropy(x, torch.ones(8000).long())
    )
    assert float(found[0]) == 20.0


def mean_loss(logits, target):
    return F.cross_entropy(logits.reshape(-1, CLASSES), target.reshape(-1))


def masked_last(logits, target):
    last = logits[:, -1]
    last[:, :3] = -1e4
    return mean_loss(logits, target.clamp(min=3))


def scaled_last(logits, target):
    logits[:, -1].mul_(2.0)
    return mean_loss(logits, target)


def scaled_alias(logits, target):
    alias = logits.float()
    alias /= 2.0
    return mean_loss(logits, target)


def masked_under_a_view(logits, target):
    flat = logits.view(-1, CLASSES)
    torch.mul(logits.detach(), 2.0, out=logits.data)
    return mean_loss(flat, target)


def copies_before_a_write(logits, target):
    copies = logits * 2.0, logits.clone(), logits.double(), logits.transpose(1, 2).contiguous(), logits[target > 3]
    logits.mul_(3.0)
    scaled, same, wide, turned, some = (copy.sum() * factor for copy, factor in zip(copies, range(1, 6), strict=True))
    return mean_loss(logits, target) + scaled + same + wide.float() + turned + some


def written_copy(logits, target):
    copy = logits.transpose(1, 2).contiguous()
    copy.mul_(2.0)
    return mean_loss(logits, target) + mean_loss(copy.transpose(1, 2), target)


@pytest.mark.parametrize(
    "loss", [masked_last, scaled_last, scaled_alias, masked_under_a_view, copies_before_a_write, written_copy]
)
def test_a_write_is_seen_where_it_is_without_us(small, target, loss):
    assert same_in_parts(lambda logits: loss(logits, target))


@pytest.mark.parametrize("loss", [masked_last, scaled_alias])
def test_a_write_into_divided_classes(small, target, loss):
    module, x = made()
    found = divided(module, x, lambda logits: loss(logits, target))
    torch.testing.assert_close(found, outcome(module, x, lambda logits: loss(logits, target))[0])


@pytest.mark.parametrize(
    ("lead", "late"),
    [
        (lambda x: torch.permute(x, dims=(0, 2, 1)), True),
        (lambda x: x.permute((0, 2, 1)), True),
        (lambda x: torch.reshape(input=x, shape=(3, 5, CLASSES)).transpose(dim0=1, dim1=2), True),
        (lambda x: torch.flatten(input=x, end_dim=1).reshape(shape=(3, 5, CLASSES)).mT, False),
        (lambda x: torch.div(x, 2, rounding_mode="floor").permute(0, 2, 1), False),
        (lambda x: x.to(torch.int64).float().permute(0, 2, 1) + x.mT, False),
        (lambda x: x.as_subclass(torch.Tensor).permute(0, 2, 1), False),
    ],
)
def test_arguments_may_be_named(small, target, lead, late):
    assert same_in_parts(lambda logits: F.cross_entropy(lead(logits), target)) is not late


@pytest.mark.parametrize("body", [True, False])
def test_logits_of_a_frozen_body_need_a_gradient(small, target, body):
    module, x = made()
    with late_logits(module):
        logits = module["head"](x.requires_grad_(body))
        assert (logits.requires_grad, logits.is_leaf, logits.grad_fn is None) == (True, False, False)
        calls = []
        note = lambda grad: calls.append(1)  # noqa: E731
        note.__module__ = "torch.distributed.fsdp"
        logits.register_hook(note)
        mean_loss(logits.float(), target).backward()
    assert logits.full is None
    assert calls == [1]


def test_a_mask_may_be_written_after_its_use(small, target):
    module, x = made()
    mask = target > 3
    with late_logits(module):
        some = module["head"](x)[mask]
        mask.zero_()
        torch.testing.assert_close(some + 0, module["head"](x)[target > 3] + 0)


def test_logits_are_freed_with_their_last_user(small):
    """Not when Python looks for cycles."""
    module, x = made()
    gc.disable()
    try:
        with late_logits(module):
            logits = module["head"](x)
            rows = logits.view(-1, CLASSES)
            references = weakref.ref(logits.computed()), weakref.ref(rows.computed()), weakref.ref(rows)
            del logits, rows
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()


GRADIENTS = [
    lambda logits, loss: logits.retain_grad(),
    lambda logits, loss: logits.register_hook(print),
    lambda logits, loss: torch.autograd.grad(loss, logits, retain_graph=True),
]


@pytest.mark.parametrize("ask", GRADIENTS)
def test_their_gradient_after_the_loss_is_refused_and_the_remedy_gives_it(small, target, ask):
    def loss(logits, before=lambda logits: None):
        before(logits)
        loss = mean_loss(logits.float(), target)
        ask(logits, loss)
        return loss

    with pytest.raises(UnsupportedError, match=r"Call `x.retain_grad\(\)` for them before the loss"):
        in_parts(*made(), loss)
    assert same_in_parts(lambda logits: loss(logits, torch.Tensor.retain_grad))


def nll(logits, target):
    return F.nll_loss(logits.log_softmax(-1).flatten(0, 1), target.flatten())


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [nll, mean_loss, lambda x, y: x.logsumexp(-1).mean() + mean_loss(x, y)])
@pytest.mark.parametrize("closure", [True, False])
def test_a_checkpoint_may_take_logits(small, target, reentrant, inside, closure):
    how = {"use_reentrant": reentrant}

    def loss(logits):
        if closure:
            return checkpoint(lambda some: inside(logits, target) * some, torch.ones((), requires_grad=True), **how)
        return checkpoint(inside, logits, target, **how)

    same_in_parts(loss)


@pytest.mark.parametrize("owner", ["0", ""])
@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_backward_hooks_of_modules_get_full_gradients(small, target, owner, kind):
    module, x = nn.Sequential(made()[0]["head"]), made()[1].requires_grad_()
    shapes = []
    getattr(module.get_submodule(owner), kind)(lambda _, *gradients: shapes.append(gradients[-1][0].shape))
    with late_logits(module):
        mean_loss(module(x), target).backward()
    assert shapes == [(3, 5, CLASSES)]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vjp, torch.func.jvp])
def test_transforms_of_functions_compute_at_once(small, target, transform):
    module, x = made()

    def outcome():
        loss = lambda rows: mean_loss(module["head"](rows), target)  # noqa: E731
        if transform is torch.func.grad:
            return transform(loss)(x)
        if transform is torch.func.vjp:
            return transform(loss, x)[1](torch.ones(()))[0]
        return transform(loss, (x,), (torch.ones_like(x),))[1]

    wanted = outcome()
    with late_logits(module):
        torch.testing.assert_close(outcome(), wanted)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_is_derived_without_gradients_has_none(small, target, mode):
    def loss(logits):
        with mode():
            teacher = logits / 2.0
            assert not teacher.requires_grad
        return F.kl_div(logits.log_softmax(-1), teacher.softmax(-1).clone(), reduction="sum")

    same_in_parts(loss)


def test_logits_of_changed_weights_are_refused(small):
    module, x = made()
    with late_logits(module):
        logits = module["head"](x)
        with torch.no_grad():
            module["head"].weight.add_(1)
        with pytest.raises(UnsupportedError, match="has changed"):
            logits.sum()


def test_where_a_loss_is_not_likely_logits_are_plain(small):
    module, x = made()
    with late_logits(module):
        assert type(torch.utils.checkpoint.checkpoint(module["head"], x, use_reentrant=False)) is torch.Tensor
        with torch.no_grad():
            assert type(module["head"](x)) is torch.Tensor
        assert type(module.eval()["head"](x)) is torch.Tensor
    assert "forward" not in vars(module["head"])


def watched(name, world, strategy, attributes, trainer):
    """`train` with small parts, and the numbers of losses in parts and of late tensors that training computed."""
    late_product.LARGE, cross_entropy.PART = 0, 1000
    parts, full = [], []
    whole, in_part = LateTensor.computed, late_operations.cross_entropy_in_parts
    # A rehearsal sends all values of a step between stages, and so computes them.
    training = lambda: not any(frame.filename.endswith("rehearsal.py") for frame in traceback.extract_stack())  # noqa: E731
    LateTensor.computed = lambda self: (training() and full.append(1), whole(self))[1]
    late_operations.cross_entropy_in_parts = lambda *args, **kwargs: (parts.append(1), in_part(*args, **kwargs))[1]
    try:
        return train(name, world, strategy, attributes, trainer), len(parts), len(full)
    finally:
        LateTensor.computed, late_operations.cross_entropy_in_parts = whole, in_part


@pytest.mark.parametrize("name", ["GPT", *(long(each) for each in ("UntiedGPT", "Llama"))])
@pytest.mark.parametrize(
    "strategy",
    [
        long({}),
        long({"zero_stage": 3, "data_parallel_size": 2}),
        {"tensor_parallel_size": 2},
        long({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        long({"pipeline_parallel_size": 2, "schedule": "interleaved_zero_bubble"}),
        long({"zero_stage": 1, "data_parallel_size": 2}),
    ],
)
def test_training_is_that_of_one_device(name, strategy):
    world = torch.Size(value for key, value in strategy.items() if key.endswith("_size")).numel()
    if strategy.get("schedule"):
        strategy = {**strategy, "stages_per_rank": 2, "num_microbatches": 4}
    attributes = {"batch_size": 8}
    results = run(watched, name, world, strategy, attributes, {}, world=world, timeout=120)
    assert_same([result for result, _, _ in results], reference(name, attributes, {}), 1e-5)
    assert results[-1][1] >= 5 and results[-1][2] == 0


class OwnLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target):
        probabilities = logits.softmax(-1)
        ctx.save_for_backward(probabilities, target)
        return -probabilities.gather(-1, target[:, None]).log().mean()

    @staticmethod
    def backward(ctx, grad):
        probabilities, target = ctx.saved_tensors
        return grad * (probabilities - F.one_hot(target, probabilities.shape[-1])) / len(target), None


class OwnLossGPT(GPT):
    remedy = False

    def loss(self, batch):
        (tokens,) = batch
        logits = self(tokens[:, :-1]).flatten(0, 1)
        return OwnLoss.apply(logits + 0 if self.remedy else logits, tokens[:, 1:].flatten())


def test_a_function_past_torch_is_refused_and_the_remedy_trains():
    name = "tests.tensor.test_loss_in_parts:OwnLossGPT"
    with pytest.raises(AssertionError, match=r"UnsupportedError: An autograd function of yours.*logits \+ 0"):
        run(watched, name, 1, {}, {}, {}, world=1)
    (result,) = run(watched, name, 1, {}, {"remedy": True}, {}, world=1)
    assert_same([result[0]], reference(name, {"remedy": True}, {}), 1e-5)
    assert result[2] >= 5


class Vocabulary(Base):
    def __init__(self):
        super().__init__()
        self.rows, self.blocks = nn.Linear(16, 16), nn.ModuleList([nn.Linear(16, 16)])
        self.head = nn.Linear(16, 2**14, bias=False)

    def tensors(self):
        return torch.randn(4, 256, 16), torch.randint(0, 2**14, (4, 256))

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.head(self.blocks[0](self.rows(x))).flatten(0, 1), y.flatten())


def peak(large, part):
    late_product.LARGE, cross_entropy.PART = large, part
    return peaks("tests.tensor.test_loss_in_parts:Vocabulary", 1, {})[0][0]


def test_memory():
    """Of a step, by the allocator's own record."""
    (plain,), (parts,) = run(peak, 2**40, 2**20, world=1), run(peak, 0, 2**20, world=1)
    logits = 4 * 256 * 2**14 * 4
    assert plain > 2 * logits
    assert parts < 0.2 * logits


class Around(ForwardLayer, rank=Layer.GATE):
    def __call__(self, *args):
        return self.next(*args)


@pytest.mark.parametrize("first", [True, False])
def test_a_layer_around_a_head_leaves_its_logits_late(small, target, first):
    (module, x), loss = made(), lambda logits: mean_loss(logits, target)
    with UndoStack() as undo:
        if first:
            add_layer(Around(module["head"]), undo)
        patch_heads(module, [], undo)
        if not first:
            add_layer(Around(module["head"]), undo)
        found, logits = outcome(module, x, loss)
    assert type(logits) is LateTensor
    assert logits.full is None
    torch.testing.assert_close(found, outcome(module, x, loss)[0])


def test_the_user_is_told_once(small, capsys, monkeypatch):
    module, x = made()
    lines = []
    monkeypatch.setattr("lightning_3d.tensor.late_head.rank_zero_info", lines.append)
    with late_logits(module):
        module["head"](x), module["head"](x)
    (line,) = lines
    assert line.startswith("head gives 0.0 GiB of logits")


def test_heads_of_blocks_are_left_alone():
    module = GPT()
    with late_logits(module, "blocks.0", "blocks.1", "blocks.2"):
        assert [name for name, part in module.named_modules() if "forward" in vars(part)] == ["head"]
