"""Gradients of a step that runs its own backward before Lightning zeroes those of the window before."""

import pytest
import torch
from torch import nn

from lightning_3d.strategy.steps import EarlyGradients


def set_gradient(module, value):
    module.weight.grad = None if value is None else torch.full((1, 1), float(value))


def gradient(module):
    return None if module.weight.grad is None else module.weight.grad.item()


@pytest.mark.parametrize(("zeroed", "total"), [(False, 1 + 2 + 3), (True, 2 + 3)])
def test_a_gradient_that_nobody_zeroes_is_added_with_the_last_batch(zeroed, total):
    module = nn.Linear(1, 1, bias=False)
    early = EarlyGradients(module, list)
    set_gradient(module, 1)
    with early.computing(first=True):
        assert gradient(module) is None
        set_gradient(module, 2)
    assert gradient(module) == 1  # for `zero_grad`, and for hooks before it
    if zeroed:
        set_gradient(module, None)
    early.give(first=True, last=False)
    assert gradient(module) == 2
    with early.computing(first=False):
        set_gradient(module, gradient(module) + 3)
    early.give(first=False, last=True)
    assert gradient(module) == total
    early.give(first=False, last=True)
    assert gradient(module) == total


def test_a_gradient_that_is_zeroed_for_sure_is_freed_before_the_step():
    module = nn.Linear(1, 1, bias=False)
    early = EarlyGradients(module, module.parameters)
    set_gradient(module, 1)
    with early.computing(first=True):
        set_gradient(module, 2)
    assert gradient(module) is None
    early.give(first=True, last=True)
    assert gradient(module) == 2
