"""Norm, head and loss behind the last block on a part of the sequence, against the same on all of it."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d.context.cut_plan import parts_of
from lightning_3d.errors import UnsupportedError
from lightning_3d.module.undo import UndoStack
from lightning_3d.tensor.axis import Axis
from lightning_3d.tensor.geometry import TensorSplit, assemble, local_part
from lightning_3d.tensor.late_operations import reshaped
from lightning_3d.tensor.late_tensor import LateTensor, compute_late
from lightning_3d.tensor.simulate import ThreadGroup, _Table, run_shards
from lightning_3d.tensor.vocabulary import patch_vocabulary
from tests.context import trained
from tests.context.test_plans import plan

ROWS, LENGTH, WIDTH, CLASSES, RANKS = 3, 10, 8, 12, 3
WEIGHT = torch.arange(1.0, CLASSES + 1)


class Sizes(TorchDispatchMode):
    """The most elements of a tensor that has all classes."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, torch.Tensor) and each.shape[-1:] == (CLASSES,) and each.device.type != "meta":
                self.most = max(self.most, each.numel())
        return result


def made():
    torch.manual_seed(0)
    labels = torch.randint(CLASSES, (ROWS, LENGTH))
    labels[0, :6], labels[1] = -100, -100  # a rank has no label in a row
    return nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES), torch.randn(ROWS, LENGTH, WIDTH), labels


def both(loss, ranks=RANKS, tensor=None):
    """Compare `loss(norm, head, stream, labels)` on all positions and on parts.

    Returns:
        True where all positions were gathered, and the most logits that a rank had.
    """
    norm, head, x, labels = made()
    x.requires_grad_()
    expected = loss(norm, head, x * 1, labels)
    expected.backward()
    wanted = [p.grad for p in (*norm.parameters(), *head.parameters())]
    split = parts_of(1, LENGTH, ranks)

    def job(axis):
        own_norm, own_head = copy.deepcopy(norm), copy.deepcopy(head)
        parameters = [*own_norm.parameters(), *own_head.parameters()]
        for parameter in parameters:
            parameter.grad = None
        part = local_part(x.detach(), split, axis.rank).clone().requires_grad_()
        stream = LateTensor.of(part, split, Axis(axis.group, weight=ranks))
        with Sizes() as sizes:
            found = compute_late(loss(own_norm, own_head, stream, labels))
            found.backward()
        return found.detach(), part.grad / ranks, [p.grad for p in parameters], stream.axis.announced, sizes.most

    outcomes = run_shards(ranks, job)
    for found, *_ in outcomes:
        torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(assemble([each[1] for each in outcomes], split), x.grad)
    for number, grad in enumerate(wanted):
        if grad is not None:
            torch.testing.assert_close(sum(each[2][number] for each in outcomes) / ranks, grad)
    assert len({each[3] for each in outcomes}) == 1
    return outcomes[0][3], max(each[4] for each in outcomes)


def shifted(logits, labels, **options):
    return F.cross_entropy(logits[..., :-1, :].reshape(-1, CLASSES), labels[..., 1:].reshape(-1), **options)


def hugging_face(logits, labels, **options):
    from transformers.loss.loss_utils import ForCausalLMLoss

    return ForCausalLMLoss(logits, labels, CLASSES, **options)


def counted(logits, labels):
    return hugging_face(logits, labels, num_items_in_batch=torch.tensor(7))


def masked(logits, labels):
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(ROWS, LENGTH)
    return (each * (labels != -100)).sum() / (labels != -100).sum()


PARTS = {
    "flat": lambda logits, y: F.cross_entropy(logits.view(-1, CLASSES), y.view(-1)),
    "shifted": shifted,
    "backwards": lambda logits, y: F.cross_entropy(logits[:, 1:].reshape(-1, CLASSES), y[:, :-1].reshape(-1)),
    "weighted": lambda logits, y: shifted(logits.float(), y, weight=WEIGHT),
    "smooth": lambda logits, y: F.cross_entropy(logits.transpose(1, 2), y, weight=WEIGHT, label_smoothing=0.1),
    "sum": lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten().abs() % 12, reduction="sum", ignore_index=4),
    "each": masked,
    "likelihood": lambda logits, y: F.nll_loss(F.log_softmax(logits, -1).view(-1, CLASSES), y.view(-1), WEIGHT),
    "soft cap": lambda logits, y: shifted(torch.tanh(logits / 5.0) * 5.0, y),
    "a few": lambda logits, y: F.cross_entropy(logits.view(-1, CLASSES)[4:-3], y.view(-1)[4:-3]),
    "Hugging Face": hugging_face,
    "Hugging Face, counted": counted,
}  # fmt: skip
WHOLE = {
    "softmax": lambda logits, y: logits.softmax(-1).square().mean(),
    "probabilities": lambda logits, y: F.cross_entropy(logits.view(-1, CLASSES), torch.full((30, CLASSES), 1 / 12)),
    "every second": lambda logits, y: F.cross_entropy(logits[:, ::2].reshape(-1, CLASSES), y[:, ::2].reshape(-1)),
    "the last": lambda logits, y: F.cross_entropy(logits[:, -1], y[:, -1]),
    "a penalty": lambda logits, y: shifted(logits, y) + logits.logsumexp(-1).square().mean(),
}


@pytest.mark.parametrize("name", [*PARTS, *WHOLE])
def test_no_rank_has_the_logits_of_another_unless_the_loss_needs_all(name):
    gathered, most = both(lambda norm, head, x, labels: (PARTS | WHOLE)[name](head(norm(x)), labels))
    assert gathered is (name in WHOLE)
    assert most == ROWS * LENGTH * CLASSES if gathered else most <= ROWS * -(-LENGTH // RANKS) * CLASSES


COMPUTED = {
    "weight": lambda x: F.linear(x, x.mean((0, 1)).expand(CLASSES, WIDTH) * WEIGHT[:, None]),
    "bias": lambda x: F.linear(x, WEIGHT[:, None].expand(CLASSES, WIDTH), x.sum((0, 1)).repeat(2)[:CLASSES]),
    "scale": lambda x: F.linear(F.layer_norm(x, (WIDTH,), x.mean((0, 1))), WEIGHT[:, None].expand(CLASSES, WIDTH)),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_weight_that_is_computed_from_all_positions_has_the_gradient_of_all(name):
    both(lambda norm, head, x, labels: F.cross_entropy(COMPUTED[name](x).view(-1, CLASSES), labels.view(-1)))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has the fused loss since 2.13")
def test_a_functional_head_and_torch_s_fused_loss():
    def loss(norm, head, x, labels):
        rows = F.rms_norm(x, (x.shape[-1],), norm.weight).flatten(0, 1)
        fused = F.linear_cross_entropy(rows, head.weight, labels.flatten(), linear_bias=head.bias, label_smoothing=0.1)
        return fused + shifted(F.linear(norm(x), head.weight), labels)

    assert both(loss) == (False, ROWS * -(-LENGTH // RANKS) * CLASSES)


def test_classes_that_tensor_ranks_divide():

    def loss(norm, head, x, labels):
        lone = Axis(ThreadGroup(_Table(1), 0))
        patch_vocabulary(head, {"weight": TensorSplit.even(0, CLASSES, 1)}, lone, UndoStack())
        return shifted(head(norm(x)), labels, weight=WEIGHT, label_smoothing=0.1)

    assert both(loss)[0] is False


@pytest.mark.parametrize(
    ("shape", "dim", "new", "found"),
    [
        ((2, 6, 3), 1, (12, 3), TensorSplit(0, (((0, 4), (6, 10)), ((4, 6), (10, 12))))),
        ((6, 2, 3), 0, (12, 3), TensorSplit(0, (((0, 8),), ((8, 12),)))),
        ((2, 6), 1, (2, 2, 3), None),
        ((2, 6), 1, (2, 3, 2), TensorSplit(1, (((0, 2),), ((2, 3),)))),
    ],
)
def test_a_division_is_followed_through_a_view(shape, dim, new, found):
    split = TensorSplit(dim, (((0, 4),), ((4, 6),)))
    assert reshaped(split, shape, new) == found
    if found is not None:
        assert reshaped(found, new, shape) == split
        full = torch.arange(torch.Size(shape).numel())
        for rank in range(2):
            own = local_part(full.view(shape), split, rank).reshape(-1)
            assert torch.equal(own, local_part(full.view(new), found, rank).reshape(-1))


def test_the_gradient_of_hidden_states_that_the_loss_did_not_need_is_refused():
    def job(axis):
        norm, head, x, labels = made()
        split = parts_of(1, LENGTH, axis.size)
        stream = LateTensor.of(local_part(x, split, axis.rank).requires_grad_(), split, Axis(axis.group, weight=2))
        hidden = norm(stream)
        shifted(head(hidden), labels)
        hidden.retain_grad()

    with pytest.raises(UnsupportedError, match="retain_grad"):
        run_shards(2, job)


class Neighbours(nn.Module):
    """Is no norm: it looks at the token before."""

    def forward(self, x):
        return x + x.roll(1, 1)


def test_modules_behind_the_blocks_are_proven():
    assert set(plan(trained.build_llama).ends) == {"model.model.norm"}
    assert set(plan(trained.build_nano).ends) == {"model.norm"}

    def mixing():
        module, batches = trained.build_nano()
        module.model.norm = nn.Sequential(nn.LayerNorm(trained.WIDTH), Neighbours())
        return module, batches

    assert set(plan(mixing).ends) == {"model.norm.0"}
