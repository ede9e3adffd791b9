"""Operations are counted by the same formulas on every device."""

import pytest
import torch

from lightning_3d.module.operation_count import OperationCount

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
