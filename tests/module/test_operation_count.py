"""Operations are counted by the same formulas on every device."""

from contextlib import nullcontext

import pytest
import torch

from lightning_3d.errors import UnsupportedError
from lightning_3d.module.graph_private import nodes_made
from lightning_3d.module.operation_count import OperationCount, ShownOperations
from lightning_3d.sandbox.interceptor import Interceptor
from lightning_3d.sandbox.without_values import ShapesOnly
from tests.zoo.odd_blocks import Square

ATEN = torch.ops.aten


@pytest.mark.parametrize("kernel", ["flash_attention", "efficient_attention", "cudnn_attention"])
def test_heads_that_share_keys_count_as_heads_of_queries(kernel):
    """torch 2.11 refuses them where it counts, which ended a training on a GPU."""
    query, keys = torch.empty(2, 8, 5, 16, device="meta"), torch.empty(2, 4, 7, 16, device="meta")
    bias = {"efficient_attention": (None, False)}.get(kernel, ())
    more = (None, False) if kernel == "cudnn_attention" else ()
    with OperationCount() as count:
        getattr(ATEN, f"_scaled_dot_product_{kernel}")(query, keys, keys, *bias, *more)
    assert count.flops == count.attention_flops == 2 * (2 * 2 * 8 * 5 * 7 * 16)


def products_of_experts(mode):
    """What counts, and the shapes of results and gradients: 6 rows of 8 numbers, 3 experts of 8 x 4."""
    with mode, OperationCount() as count:
        rows, weights = torch.empty(6, 8, requires_grad=True), torch.empty(3, 8, 4, requires_grad=True)
        result = torch._grouped_mm(rows, weights, torch.tensor([2, 4, 6], dtype=torch.int32))
        result.square().sum().backward()
    return count.flops, [each.shape for each in (result, rows.grad, weights.grad)]


def test_products_of_experts_count_with_and_without_values():
    assert products_of_experts(nullcontext()) == (3 * 2 * 6 * 8 * 4, [(6, 4), (6, 8), (3, 8, 4)])
    assert products_of_experts(ShapesOnly()) == products_of_experts(nullcontext())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_code_that_runs_uncompiled_later_is_no_other_code():
    """torch does so after 8 versions. An operation that begins in compiled code is named."""
    block, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    shown = ShownOperations(block, "Linear computes", "Why", "do", beside=True)
    plain = lambda later: Square.apply(block(x).tanh() if later else block(x))  # noqa: E731
    compiled = torch.compile(plain, backend="eager")

    def run(later):
        start = nodes_made()
        shown.note(start, [compiled(later)])

    run(False)
    with torch.compiler.set_stance("force_eager"):
        run(False)
    with pytest.warns(UserWarning, match=r"did not show \(Tanh\)"):
        run(True)


def test_a_conditional_trains_while_it_is_counted_and_is_refused_while_it_is_watched():
    weight, ones = torch.ones(3, requires_grad=True), torch.ones(3)
    run = lambda: torch.cond(weight.sum() > 0, lambda x: x * weight, lambda x: x - weight, (ones,))  # noqa: E731
    with OperationCount():
        run().sum().backward()
    assert torch.equal(weight.grad, ones)
    with pytest.raises(UnsupportedError, match=r"Write torch\.where"), Interceptor():
        run()
