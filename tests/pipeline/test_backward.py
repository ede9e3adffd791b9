"""A backward in two halves is used where it gives the gradients of a whole one."""

import pytest
import torch
from torch import nn

from lightning_3d.pipeline.backward import full_backward, halves_agree, input_half


def chain(x, layer, other):
    return other(torch.tanh(layer(x)))


def twice_at_two_depths(x, layer, other):
    return other(torch.tanh(layer(x))) + 0.1 * layer.bias.square().sum()


def hooked(x, layer, other):
    y = layer(x)
    y.register_hook(lambda grad: 2 * grad)
    return other(torch.tanh(y))


def side_output(x, layer, other):
    return other(torch.tanh(layer(x))) + other.bias.square()


@pytest.mark.parametrize(
    ("function", "agree"), [(chain, True), (side_output, False), (twice_at_two_depths, False), (hooked, False)]
)
def test_whether_halves_agree(function, agree):
    torch.manual_seed(0)
    layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
    parameters = [*layer.parameters(), *other.parameters()]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 7.0)
    x = torch.randn(3, 4, requires_grad=True)
    output = function(x, layer, other)
    grad = torch.randn_like(output)
    wanted = torch.autograd.grad([output], [x, *parameters], [grad], retain_graph=True)
    assert halves_agree([output], [grad], [x], parameters, wanted) is agree
    assert x.grad is None
    assert all(bool((parameter.grad == 7).all()) for parameter in parameters)


def beside_a_table(x, layer, other):
    """The second output depends on no input, as rows of a table of positions that a stage hands on."""
    return [chain(x, layer, other), other.weight * layer.bias]


@pytest.mark.parametrize("function", [lambda *given: [chain(*given)], beside_a_table], ids=["chain", "table"])
def test_halves_give_what_a_whole_backward_gives(function):
    torch.manual_seed(0)
    layer, other = nn.Linear(4, 4), nn.Linear(4, 4)
    parameters = [*layer.parameters(), *other.parameters()]
    x = torch.randn(3, 4, requires_grad=True)
    outputs = function(x, layer, other)
    full_backward(outputs, [torch.ones_like(each) for each in outputs])
    wanted = [tensor.grad for tensor in (x, *parameters)]
    for tensor in (x, *parameters):
        tensor.grad = None
    outputs = function(x, layer, other)
    half = input_half(outputs, [torch.ones_like(each) for each in outputs], [x], parameters)
    assert torch.equal(x.grad, wanted[0])
    assert all(parameter.grad is None for parameter in parameters)
    half.run(parameters)
    for parameter, grad in zip(parameters, wanted[1:], strict=True):
        torch.testing.assert_close(parameter.grad, grad)
