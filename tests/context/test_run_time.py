"""What is seen in training only: lengths and values that no proof before it had."""

import re
from typing import ClassVar

import pytest
import torch
from torch.nn import functional as F

from lightning_3d.context import compared_block
from lightning_3d.errors import Lightning3DError
from tests.context.trained import WIDTH, Block, Nano, Training, build_few_heads, nano, next_token, token_batches
from tests.parity import fit_with, long
from tests.workers import run


class Window(Block):
    def __init__(self, *_):
        super().__init__("plain", 4, 0.0)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = (t.view(rows, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(WIDTH, dim=2))
        mixed = F.scaled_dot_product_attention(q, k[:, :, -8:], v[:, :, -8:])
        return x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))


def of_lengths(*lengths):
    """Batches, the first of which shows no window: each part is shorter."""
    batches = [token_batches(length)[0] for length in lengths]
    model = Nano(("plain",) * 2)
    model.blocks = torch.nn.ModuleList(Window() for _ in range(2))
    return Training(model, next_token), batches


def build_uneven():
    """Parts of 9 and of 8 positions: the second is as long as the window."""
    return of_lengths(8, 17)


def refusal(build, strategy):
    """The message of the error that ends training on this rank."""
    with pytest.raises(Lightning3DError) as raised:
        fit_with(build, strategy, {})
    return str(raised.value)


def test_parts_of_unequal_lengths_are_refused_on_every_rank():
    for message in run(refusal, build_uneven, {"context_parallel_size": 2}, world=2, timeout=60):
        assert "8, 4) keys, as its proof did not" in message


class Far(Block):
    """Adds the token 12 positions earlier, from a call on, and puts numbers aside."""

    aside: ClassVar[list] = []

    def __init__(self, kind, *_):
        super().__init__("plain", 4, 0.0)
        self.what, self.calls, self.offset = kind, 0, 12

    def forward(self, x):
        self.calls += 1
        x = super().forward(x)
        if self.what == "far" and x.shape[1] > self.offset:
            x = torch.cat([x[:, : self.offset], x[:, self.offset :] + x[:, : -self.offset]], 1)
        if self.what == "later" and self.calls >= 6:
            Far.aside.append(0.1 * x.pow(2).mean())
        return x


def far(kind, *lengths):
    module, batches = of_lengths(*lengths)
    module.model.blocks = torch.nn.ModuleList(Far(kind) for _ in range(2))
    return module, batches


def build_far():
    """The batch of the proof has no position that far back."""
    return far("far", 12, 12, 32)


def build_later():
    """A loss that is put aside after a warm-up."""
    return far("later", *[16] * 20)


def build_changed():
    """Code around the blocks changes their reach in the sixth step, and in no power of two."""
    module, batches = far("far", *[16] * 20)
    for block in module.model.blocks:
        block.offset = 64

    def loss_of(model, batch):
        if module.global_step == 5:
            for block in model.blocks:
                block.offset = 4
        return next_token(model, batch)

    module.loss_of = loss_of
    return module, batches


@pytest.mark.parametrize(
    ("build", "why"),
    [
        (build_far, "result 0 differs for .* of the tokens"),
        (build_later, "puts a number of its part aside"),
        (build_changed, "result 0 differs for .* This is call 6 of it"),
    ],
)
def test_what_no_proof_saw_ends_training_on_every_rank(build, why):
    for message in run(refusal, build, {"context_parallel_size": 2, "zero_stage": 0}, world=2, timeout=60):
        assert re.search(f"model.blocks.0 .*computes other numbers on a part of a sequence .*{why}", message), message


def build_raised():
    """Attention that begins to drop in the third step; one head, so that keys are gathered."""
    module, batches = nano("plain", "plain", heads=1)
    steps = iter(range(20))

    def loss_of(model, batch):
        rate = 0.5 if next(steps) > 4 else 0.0  # three runs come before training
        for block in model.blocks:
            block.dropout = rate
        return next_token(model, batch)

    module.loss_of = loss_of
    return module, batches


def losses_and_state(build, strategy):
    return fit_with(build, strategy, {})["losses"], torch.get_rng_state()


def test_dropout_of_attention_may_begin_in_training():
    """Every rank has its own masks, and ranks draw the same numbers afterwards."""
    strategy = {"context_parallel_size": 2, "zero_stage": 0}
    (first, state), (second, other) = run(losses_and_state, build_raised, strategy, world=2)
    ((alone, _),) = run(losses_and_state, build_raised, None, world=1)
    assert first == second and torch.equal(state, other)
    assert first[:3] == pytest.approx(alone[:3], rel=1e-5) and first[-1] != pytest.approx(alone[-1], rel=1e-5)


def in_two_divisions(build, strategy, right):
    """As where hidden states are too large to be computed whole. True where the block computes rightly."""
    compared_block.WHOLE = 0
    return fit_with(build, strategy, {}) is not None if right else refusal(build, strategy)


@pytest.mark.parametrize("build", [build_far, long(build_few_heads)])
def test_long_sequences_are_compared_in_two_divisions(build):
    right = build is build_few_heads
    for found in run(in_two_divisions, build, {"context_parallel_size": 2, "zero_stage": 0}, right, world=2):
        assert found is True if right else "result 0 differs for" in found
