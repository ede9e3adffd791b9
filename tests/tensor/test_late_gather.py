"""Logits in parts: the loss, what leads to it, and everything else."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from lightning_3d.tensor.geometry import TensorSplit, assemble, local_part
from lightning_3d.tensor.late_tensor import OF_STAND_IN, LateTensor, compute_late, pass_late
from lightning_3d.tensor.simulate import run_shards

CLASSES, RANKS = 11, 3
SPLIT = TensorSplit.even(2, CLASSES, RANKS)


@pytest.fixture
def logits():
    return torch.randn(3, 5, CLASSES, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def target():
    return torch.randint(0, CLASSES, (3, 5), generator=torch.Generator().manual_seed(1))


def both(logits, function):
    """`function` of the whole logits and of each rank's part: values, gradients, whether the part was gathered."""
    leaf = logits.clone().requires_grad_()
    expected = function(leaf * 1)
    expected.sum().backward()

    def job(axis):
        part = local_part(logits, SPLIT, axis.rank).clone().requires_grad_()
        lazy = LateTensor.of(part, SPLIT, axis)
        found = function(lazy)
        found.sum().backward()
        return found.detach(), part.grad, lazy.full is not None

    results = run_shards(RANKS, job)
    for found, _, _ in results:
        torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(assemble([grad for _, grad, _ in results], SPLIT), leaf.grad)
    return any(gathered for _, _, gathered in results)


@pytest.mark.parametrize(
    ("reduction", "smoothing", "weighted", "ignored"),
    list(itertools.product(["mean", "sum", "none"], [0.0, 0.1], [False, True], [-100, 3])),
)
def test_cross_entropy_is_that_of_the_whole(logits, target, reduction, smoothing, weighted, ignored):
    weight = torch.arange(1.0, CLASSES + 1) if weighted else None
    target[0, :2] = ignored

    def loss(x):
        return F.cross_entropy(
            x.transpose(1, 2), target, weight=weight, ignore_index=ignored, reduction=reduction,
            label_smoothing=smoothing,
        )  # fmt: skip

    assert not both(logits, loss)


@pytest.mark.parametrize(
    "lead",
    [
        lambda x: (x.view(-1, CLASSES), slice(None)),
        lambda x: (x.float().reshape(-1, x.size(-1)), slice(None)),
        lambda x: (x[..., :-1, :].contiguous().view(-1, CLASSES), (slice(None), slice(1, None))),
        lambda x: (x.flatten(0, 1), slice(None)),
        lambda x: (x.permute(0, 2, 1), slice(None)),
        lambda x: ((x / 2.0).view(15, -1), slice(None)),
    ],
)
def test_what_leads_to_the_loss_gathers_nothing(logits, target, lead):
    def loss(x):
        scores, kept = lead(x)
        labels = target[kept]
        return torch.nn.CrossEntropyLoss()(scores, labels if scores.dim() > 2 else labels.reshape(-1))

    assert not both(logits, loss)


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x.softmax(-1).square(),
        lambda x: x[..., 3],
        lambda x: F.nll_loss(x.log_softmax(-1).view(-1, CLASSES), torch.arange(15) % CLASSES),
        lambda x: x.chunk(2, dim=-1)[0].exp(),
        lambda x: torch.cat([x, x], dim=-1),
        lambda x: x.split(4, dim=-1)[1],
        lambda x: x + 1,
    ],
)
def test_anything_else_sees_the_whole(logits, other):
    assert both(logits, other)


def test_probabilities_as_target_see_the_whole(logits):
    both(logits, lambda x: F.cross_entropy(x.view(-1, CLASSES), torch.full((15, CLASSES), 1 / CLASSES)))


def test_questions_gather_nothing(logits):
    def job(axis):
        lazy = LateTensor.of(local_part(logits, SPLIT, axis.rank).requires_grad_(), SPLIT, axis)
        answers = lazy.shape, lazy.size(-1), lazy.dtype, lazy.device.type, lazy.ndim, len(lazy), lazy.requires_grad
        return answers, lazy.full is None

    expected = ((3, 5, CLASSES), CLASSES, torch.float32, "cpu", 3, 3, True)
    for answers, untouched in run_shards(RANKS, job):
        assert answers == expected
        assert untouched


def test_whole_gathers_inside_containers(logits):
    def job(axis):
        made = compute_late({"logits": LateTensor.of(local_part(logits, SPLIT, axis.rank), SPLIT, axis), "n": 1})
        return type(made["logits"]), made["logits"], made["n"]

    for kind, found, number in run_shards(RANKS, job):
        assert kind is torch.Tensor
        assert torch.equal(found, logits)
        assert number == 1


def test_the_names_that_lazy_tensors_rely_on_exist():
    assert torch.Tensor.shape.__get__ in OF_STAND_IN


def test_past_torch_function_is_an_error_and_not_a_lost_gradient(logits):
    class Past(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return torch.ones(tensor.shape)

        @staticmethod
        def backward(ctx, grad):
            return grad

    def job(axis):
        lazy = LateTensor.of(local_part(logits, SPLIT, axis.rank).clone().requires_grad_(), SPLIT, axis)
        Past.apply(lazy).sum().backward()

    with pytest.raises(RuntimeError, match="meta"):
        run_shards(RANKS, job)


def test_in_front_of_a_block_it_says_that_it_needs_no_gradient(logits):
    def job(axis):
        late = LateTensor.of(local_part(logits, SPLIT, axis.rank).clone().requires_grad_(), SPLIT, axis)
        before = late.requires_grad
        pass_late(torch.nn.Identity(), (), {"x": [late]})
        return before, late.requires_grad, late._base

    assert run_shards(RANKS, job)[0] == (True, False, None)


def of_fsdp(grad):
    """As FSDP2's own hook."""


of_fsdp.__module__ = "torch.distributed.fsdp"


def test_only_the_hook_of_fsdp_is_put_on_the_shard(logits, target):
    def job(axis):
        late = LateTensor.of(local_part(logits, SPLIT, axis.rank).clone().requires_grad_(), SPLIT, axis)
        late.register_hook(of_fsdp)
        untouched, shapes = late.full is None, []
        late.register_hook(lambda grad: shapes.append(grad.shape))
        F.cross_entropy(late.flatten(0, 1), target.flatten()).backward()
        return untouched, shapes

    assert run_shards(RANKS, job) == [(True, [logits.shape])] * RANKS


def clip(x):
    x.register_hook(lambda grad: grad * (0.05 / grad.norm()).clamp(max=1.0))
    return x


def last_positions(x):
    last = x[:, -1]
    last[:, :3] = -1e4
    last.mul_(2)
    return x


def base(x):
    flat = x.view(-1, CLASSES)
    x[..., 0] = -1e4
    return flat.view(3, 5, CLASSES)


@pytest.mark.parametrize("change", [clip, last_positions, base])
def test_hooks_and_writes_meet_the_whole(logits, target, change):
    wanted = target.clamp(min=3)
    assert both(logits, lambda x: F.cross_entropy(change(x).transpose(1, 2), wanted))


def test_inside_a_checkpoint_the_loss_gathers_nothing_in_both_runs(logits, target):
    def job(axis):
        part, untouched = local_part(logits, SPLIT, axis.rank).clone().requires_grad_(), []

        def region(shard):
            late = LateTensor.of(shard * 1, SPLIT, axis)
            loss = F.cross_entropy(late.float().flatten(0, 1), target.flatten())
            untouched.append(late.full is None)
            return loss.square()

        checkpoint(region, part, use_reentrant=False).backward()
        return untouched, part.grad

    leaf = logits.clone().requires_grad_()
    F.cross_entropy(leaf.flatten(0, 1), target.flatten()).square().backward()
    results = run_shards(RANKS, job)
    assert [untouched for untouched, _ in results] == [[True, True]] * RANKS
    torch.testing.assert_close(assemble([grad for _, grad in results], SPLIT), leaf.grad)
