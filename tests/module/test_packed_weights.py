"""Quantised weights are known by their classes and states, here without the packages that make them."""

import pytest
import torch
from torch import nn

from lightning_3d.errors import UnsupportedError
from lightning_3d.layout import Layout
from lightning_3d.module.packed_weights import check_packed, check_saved, is_packed, is_whole
from lightning_3d.parallel.state_counts import expected_states
from lightning_3d.strategy.fit_report import _bytes
from lightning_3d.tools.auto_layout import able
from lightning_3d.tools.planner.profile_module import count_module


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


class Wrapped(torch.Tensor):
    """Eight bits and scales behind a tensor of 32 bits, as in torchao."""

    @staticmethod
    def __new__(cls, values, factors):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=torch.float32)

    def __init__(self, values, factors):
        self.values, self.factors = values, factors

    def __tensor_flatten__(self):
        return ["values", "factors"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].values, args[0].factors)
        raise NotImplementedError(str(func))


def wrapped():
    """Two blocks with weights of 8 bits in a class of their own."""
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    for block in module:
        values = Wrapped(torch.zeros(16, 16, dtype=torch.int8), torch.ones(16))
        block.weight = nn.Parameter(values, requires_grad=False)
    return module


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_four_bits_are_packed_in_any_storage(storage):
    module = four_bits(storage)
    assert [is_packed(each) for each in module.parameters()] == [True, False, True, False]
    assert not any(map(is_whole, module.parameters()))
    with pytest.raises(UnsupportedError, match=r"0\.weight and 1 more are quantised \(FourBits"):
        check_packed(module, Layout(pipeline_parallel_size=2))


def test_weights_of_a_class_count_by_what_they_wrap():
    module, here = wrapped(), 2 * (16 * 16 + 16 * 4) + 2 * 16 * 4
    assert expected_states(module, Layout(), None, None)[0].weights == here
    assert _bytes(module.parameters()) == here
    assert count_module(module, name="wrapped").parameters == here / 4


def test_weights_of_a_class_are_not_saved_sharded(recwarn):
    check_saved(four_bits(), sharded=True)
    assert not recwarn
    with pytest.raises(UnsupportedError, match=r'0\.weight and 1 more .* Wrapped, .* checkpoint_format="full"'):
        check_saved(wrapped(), sharded=True)
    with pytest.warns(UserWarning, match="cannot resume from a checkpoint of these"):
        check_saved(wrapped(), sharded=False)


@pytest.mark.parametrize(("make", "tensor"), [(four_bits, True), (wrapped, False)])
def test_no_pipeline_is_chosen_for_packed_weights(make, tensor):
    module = make()
    module.automatic_optimization = True
    ability = able(module, Layout())
    assert (ability.pipeline, ability.tensor) == (1, tensor)
    assert ability.reasons == ("quantised weights are not cut into stages",)
