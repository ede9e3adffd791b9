"""Quantised weights are known by their classes and states, here without the packages that make them."""

import pytest
import torch
from torch import nn

from lightning_3d.errors import UnsupportedError
from lightning_3d.layout import Layout
from lightning_3d.module.packed_weights import is_packed, is_whole
from lightning_3d.strategy.checks import check_packed


class FourBits(nn.Parameter):
    """Packed values with the state that unpacks them, as bitsandbytes has them."""

    quant_state = None


def four_bits(storage=torch.uint8):
    """Two blocks with a weight of 4 bits each."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for block in module:
        block.weight = FourBits(torch.zeros(8, 1, dtype=storage), requires_grad=False)
        block.weight.quant_state = object()
    return module


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_four_bits_are_packed_in_any_storage(storage):
    module = four_bits(storage)
    assert [is_packed(each) for each in module.parameters()] == [True, False, True, False]
    assert not any(map(is_whole, module.parameters()))
    with pytest.raises(UnsupportedError, match=r"0\.weight and 1 more are quantised \(FourBits"):
        check_packed(module, Layout(pipeline_parallel_size=2))
