"""Ten steps in shards against ten steps on one process: losses and every gathered parameter."""

import functools
import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.parity import in_turn, long
from tests.tensor.parity import check
from tests.zoo import blocks
from tests.zoo.families import FAMILIES


def square(module, batch):
    return F.mse_loss(module(batch[0]), batch[1])


def causal(module, batch):
    return module(input_ids=batch, labels=batch).loss


def own_loss(module, batch):
    return module(batch[:, :-1], batch[:, 1:])


def classify(module, batch):
    return module(input_ids=batch, labels=batch[:, 0] % 2).loss


def classify_image(module, batch):
    return module(pixel_values=batch, labels=torch.arange(len(batch)) % 2).loss


def floats():
    return torch.randn(2, 8, 16), torch.randn(2, 8, 16)


def tokens(length=9):
    return torch.randint(0, 50, (2, length))


def images():
    return torch.randn(3, 3, 16, 16)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_mlp(optimizer):
    seen = check(blocks.MLP, square, floats, optimizer=optimizer)
    assert seen["collectives"] == 1  # the input needs no gradient


@pytest.mark.parametrize("size", [2, 3, long(4)])
def test_nano_gpt(size):
    seen = check(blocks.nano_gpt, square, floats, size=size, share=0.6)
    assert set(seen["whole"]) <= {"vit.embeddings"}
    assert seen["collectives"] == 4 * 2


VOCABULARY = 4
"""Sums of a split embedding and head: forward of one, backward of the other, two in the loss."""


@pytest.mark.parametrize("size", [2, long(4)])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_llama(size, optimizer):
    seen = check(blocks.llama, causal, tokens, size=size, optimizer=optimizer)
    if size == 2:
        assert seen["collectives"] == 4 * 2 + VOCABULARY
    assert seen["local"]["lm_head.weight"] <= -(-50 // size) * 32


@pytest.mark.parametrize("size", [2, 3])
def test_gpt_with_tied_uneven_vocabulary(size):
    seen = check(blocks.GPT, own_loss, tokens, size=size, share=0.6)
    assert seen["collectives"] == 4 * 2 + VOCABULARY
    assert seen["local"]["wte.weight"] == -(-51 // size) * 16


LISTED = [
    (blocks.packed, square, floats),
    (blocks.encoder, square, floats),
    (blocks.gpt2, causal, tokens),
    (blocks.bert, classify, tokens),
    (blocks.vit, classify_image, images),
]


def _listed():
    """Each with one optimizer in turn; all other pairs are long."""
    for (at, case), (place, optimizer) in itertools.product(enumerate(LISTED), enumerate(["sgd", "adamw"])):
        name = f"{case[0].__name__}-{optimizer}"
        yield pytest.param(*case, optimizer, marks=() if at % 2 == place else pytest.mark.long, id=name)


@pytest.mark.parametrize(("build", "loss", "batch", "optimizer"), list(_listed()))
def test_listed_families(build, loss, batch, optimizer):
    seen = check(build, loss, batch, optimizer=optimizer)
    assert set(seen["whole"]) <= {"vit.embeddings"}


@pytest.mark.parametrize(
    ("build", "loss", "batch"),
    in_turn(
        [
            (functools.partial(blocks.encoder, norm_first=True), square, floats),
            (blocks.neox, causal, tokens),
            (blocks.t5, causal, tokens),
            (blocks.mixtral, causal, tokens),
            (blocks.phi3, causal, tokens),
        ],
        2,
    ),
)
def test_other_families(build, loss, batch):
    check(build, loss, batch)


@pytest.mark.parametrize(
    ("build", "loss", "batch"),
    [
        (blocks.nano_gpt, square, floats),
        (blocks.encoder, square, floats),
        long(blocks.GPT, own_loss, tokens),
        long(blocks.llama, causal, tokens),
        long(blocks.bert, classify, tokens),
        long(blocks.t5, causal, tokens),
        (FAMILIES["bart"].build, causal, tokens),  # hands its decoder an encoder state in parts, with no norm between
    ],
)
def test_sequence_parallel(build, loss, batch):
    even = functools.partial(tokens, 8) if batch is tokens and build is not blocks.GPT else batch
    seen = check(build, loss, even, sequence_parallel=True)
    assert not any("sequence" in name for name in seen["whole"])
    assert seen["ops"]["reduce_scatter"] > 0


def test_sequence_parallel_with_uneven_parts():
    check(blocks.GPT, own_loss, tokens, size=3, share=0.6, sequence_parallel=True)


@pytest.mark.parametrize("sequence_parallel", [True, long(False)])
def test_replicas_stay_bitwise_equal_for_fifty_steps(sequence_parallel):
    check(blocks.llama, causal, tokens, steps=50, optimizer="adamw", sequence_parallel=sequence_parallel)
