"""Fake tensors that remember results give what real ones give, the second time too."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import tree_leaves

from lightning_3d.tools.dryrun.fake_cache import QuickFakeMode

OPERATIONS = {
    "add": lambda x, w: x + x[:1],
    "scalar": lambda x, w: (x.int() * 2, x.int() * 2.0, x.int() * True),
    "linear": lambda x, w: F.linear(x, w),
    "views": lambda x, w: (x.t(), x.view(2, 2, 8), x.expand(3, 4, 8), x[:, 2:5], x[1], x.permute(1, 0)),
    "split": lambda x, w: x.split(3, dim=1),
    "chunk_of_a_view": lambda x, w: x.t().chunk(2, dim=1),
    "in_place": lambda x, w: (x.clone().add_(1), x.clone().t().mul_(2), x.clone().zero_()),
    "unsafe_view": lambda x, w: x.view(2, 2, 8) @ w.t(),
    "layer_norm": lambda x, w: torch.native_layer_norm(x, [8], None, None, 1e-5),
    "attention": lambda x, w: F.scaled_dot_product_attention(*[x.view(1, 4, 2, 4).transpose(1, 2)] * 3, is_causal=True),
    "cat": lambda x, w: torch.cat([x, w.narrow(0, 0, 2)]),
    "reduced": lambda x, w: (x.sum(), x.amax(dim=1, keepdim=True), x.argmax(dim=1), x > 0),
    "cast": lambda x, w: (x.bfloat16(), x.to(torch.float64).to(torch.float32), x.to(torch.float32)),
    "made_like": lambda x, w: (torch.zeros_like(x.t()), x.new_empty(3, 5), x.contiguous(), x.t().contiguous()),
    "positions": lambda x, w: (x[torch.tensor([0, 2])], F.embedding(torch.tensor([[1, 2]]), w)),
    "complex": lambda x, w: torch.view_as_real(torch.view_as_complex(x.view(4, 4, 2)) * 2),
}


def described(results, base):
    """Everything that shapes of later results and the memory of a step depend on."""
    return [
        (leaf.shape, leaf.stride(), leaf.dtype, leaf.storage_offset(), leaf.untyped_storage().nbytes(),
         leaf.untyped_storage()._cdata == base.untyped_storage()._cdata)
        for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)
    ]  # fmt: skip


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_are_those_of_real_tensors(name):
    real = torch.randn(4, 8), torch.randn(6, 8)
    expected = described(OPERATIONS[name](*real), real[0])
    mode = QuickFakeMode()
    fake = [mode.from_tensor(tensor) for tensor in real]
    with mode:
        first, second = (described(OPERATIONS[name](*fake), fake[0]) for _ in range(2))
    assert first == second == expected


def test_gradients_go_through_remembered_results():
    mode = QuickFakeMode()
    with mode:
        shapes = []
        for _ in range(2):
            w, x = torch.ones(6, 8, requires_grad=True), torch.ones(2, 4, 8)
            F.layer_norm(F.linear(x, w), [6]).square().sum().backward()
            shapes.append((w.grad.shape, w.grad.stride(), w.requires_grad, w.grad.requires_grad))
    assert shapes[0] == shapes[1] == (torch.Size([6, 8]), (8, 1), True, False)


def test_what_depends_on_values_is_refused_every_time():
    mode = QuickFakeMode()
    mode.answers = False  # a build has answers
    fake = mode.from_tensor(torch.ones(4))
    for _ in range(2):
        with mode, pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            fake[fake > 0]
        with mode, pytest.raises(DataDependentOutputException):
            fake.sum().item()


def test_the_short_way_is_taken(monkeypatch):
    mode, asked = QuickFakeMode(), []
    dispatch = FakeTensorMode.dispatch
    monkeypatch.setattr(FakeTensorMode, "dispatch", lambda self, *args: asked.append(args[0]) or dispatch(self, *args))
    fake = mode.from_tensor(torch.ones(2, 3))
    with mode:
        for _ in range(10):
            (fake + 1).t().mul_(2).t().contiguous()
        fake + 1.0  # not what `+ 1` was
    names = [func.name() for func in asked if func.namespace == "aten"]
    assert names == ["aten::add.Tensor", "aten::t", "aten::mul_.Tensor", "aten::t", "aten::add.Tensor"]
