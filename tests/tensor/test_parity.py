import functools

import pytest
import torch
import torch.nn.functional as F

from tests.tensor import models
from tests.tensor.parity import check


def square(module, batch):
    return F.mse_loss(module(batch[0]), batch[1])


def causal(module, batch):
    return module(input_ids=batch, labels=batch).loss


def floats():
    return torch.randn(2, 8, 16), torch.randn(2, 8, 16)


def tokens():
    return torch.randint(0, 50, (2, 9))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_mlp(optimizer):
    seen = check(models.MLP, square, floats, optimizer=optimizer)
    assert seen["collectives"] == 1  # the input needs no gradient


@pytest.mark.parametrize("size", [2, 3, 4])
def test_nano_gpt(size):
    seen = check(models.nano_gpt, square, floats, size=size, share=0.6)
    assert not seen["whole"]
    assert seen["collectives"] == 4 * 2


@pytest.mark.parametrize("size", [2, 4])
def test_llama(size):
    seen = check(models.llama, causal, tokens, size=size, optimizer="adamw")
    if size == 2:
        assert seen["collectives"] == 4 * 2
