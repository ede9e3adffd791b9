"""Data ranks whose data leave out different parameters train as one device does, or are refused in words."""

import re
import time
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist
from torch import nn

from tests.experts.trained import Listed, Soft
from tests.parity import assert_parity, reference, train
from tests.workers import WorkerError, run


class Uneven(Listed):
    """Some batches have tokens of an expert on one data rank only. None has tokens of the last one, which stays as it is."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.router.bias.data += torch.tensor([2.0, 0.5, -1.5, -50.0])


class Bare(Uneven):
    """Lists of experts are the outermost lists of blocks."""

    def __init__(self):
        super().__init__()
        self.one, self.two = blocks = self.blocks
        del self.blocks
        self.blocks = tuple(blocks)


@pytest.mark.parametrize(
    ("kind", "world", "strategy", "trainer"),
    [
        ("Uneven", 2, {"zero_stage": 3}, {}),
        ("Bare", 2, {"zero_stage": 3}, {}),
        ("Uneven", 2, {"zero_stage": 1}, {"accumulate_grad_batches": 2}),
        ("Uneven", 2, {"zero_stage": 2}, {"accumulate_grad_batches": 2}),
        ("Uneven", 4, {"zero_stage": 3, "zero_shard_size": 2}, {}),
        ("Uneven", 4, {"zero_stage": 3, "tensor_parallel_size": 2}, {}),
        ("Uneven", 4, {"zero_stage": 2, "pipeline_parallel_size": 2}, {}),
    ],
    ids=["zero3", "bare", "accumulated1", "accumulated2", "hybrid", "tensor", "pipeline"],
)
def test_gradients_that_one_rank_lacks_count_as_zeros(kind, world, strategy, trainer):
    trainer = {"gradient_clip_val": 0.5, "max_epochs": 2, **trainer}
    assert_parity(f"tests.zero.test_missing:{kind}", world, {"quiet": True, **strategy}, trainer=trainer)


class Skipping(Listed):
    """Each data rank calls one of two equal blocks, chosen by its data."""

    def loss(self, batch):
        x, spread = self.blocks[int(batch[0][0, 0, 0] > 0)](self.embed(batch[0]))
        return (self.head(x) - batch[0][..., :3]).square().mean() + spread


SKIPPING = "tests.zero.test_missing:Skipping"


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_block_that_is_skipped_on_one_rank_is_refused(zero_stage):
    """Its messages have the length of those of another block, and would be added to them."""
    with pytest.raises(WorkerError, match=r"DivergenceError: Data ranks have called .*zero_stage=0") as refused:
        run(train, SKIPPING, 2, {"zero_stage": zero_stage, "quiet": True, "timeout": 20}, {}, {}, world=2)
    assert len(re.findall("Error: Data ranks have called the blocks", str(refused.value))) == 2
    run(train, SKIPPING, 2, {"zero_stage": 0, "quiet": True}, {}, {}, world=2)


class Last(Soft):
    """The last block is called on one data rank alone. The other one goes on, to a message or the end of the step."""

    logs = False

    def loss(self, batch):
        x = self.embed(batch[0])
        for block in self.blocks[: None if dist.is_initialized() and dist.get_rank() else -1]:
            x, _ = block(x)
        return x.square().mean()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.logs:
            self.log("loss", loss, sync_dist=True)
        return loss


@pytest.mark.parametrize("logs", [False, True])
def test_a_rank_that_waits_for_a_block_that_another_skipped_hears_of_it_at_once(logs):
    """Both waited until the timeout, which is half an hour where nobody sets it."""
    settings, start = {"zero_stage": 3, "quiet": True, "timeout": 60}, time.monotonic()
    with pytest.raises(WorkerError) as refused:
        run(train, f"{__name__}:Last", 2, settings, {"logs": logs}, {}, world=2)
    assert len(re.findall("Error: Data ranks have called the blocks", str(refused.value))) == 2
    assert time.monotonic() - start < 40


class Drops(Soft):
    """An encoder in the manner of Hugging Face, which skips blocks at random."""

    class Encoder(nn.Module):
        def __init__(self, blocks):
            super().__init__()
            self.layers, self.config = blocks, SimpleNamespace(layerdrop=0.0)

        def forward(self, x):
            for layer in self.layers:
                if not (self.training and torch.rand([]) < self.config.layerdrop):
                    x, _ = layer(x)
            return x

    def __init__(self):
        super().__init__()
        self.encoder = Drops.Encoder(self.blocks)
        del self.blocks

    frozen = False

    def setup(self, stage):
        self.encoder.config.layerdrop = self.drop
        if self.frozen:
            self.encoder.eval().requires_grad_(False)

    def loss(self, batch):
        return self.encoder(self.embed(batch[0])).square().mean()


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_layers_that_are_dropped_at_random_are_refused_before_training(zero_stage):
    """Hugging Face's wav2vec2 drops none where FSDP shards it. Others waited for each other."""
    with pytest.raises(WorkerError, match=r"'encoder' skips its blocks at random in training \(layerdrop=0.3\)"):
        run(train, f"{__name__}:Drops", 2, {"zero_stage": zero_stage}, {"drop": 0.3}, {}, world=2)
    assert_parity(f"{__name__}:Drops", 2, {"zero_stage": zero_stage, "quiet": True}, attributes={"drop": 0.0})
    assert_parity(f"{__name__}:Drops", 2, {"zero_stage": zero_stage}, attributes={"drop": 0.3, "frozen": True})


class Turns(Soft):
    """Two networks with an optimizer each, of which every other step trains one."""

    managed = True

    automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.AdamW(block.parameters(), lr=0.01, weight_decay=0.5) for block in self.blocks]

    def training_step(self, batch, batch_idx):
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, spread = self.blocks[batch_idx % 2](self.embed(batch[0]))
        loss = x.square().mean() + spread
        if self.managed:
            self.manual_backward(loss)
        else:
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        self.log("loss", loss, sync_dist=True)


class OwnTurns(Turns):
    """The step calls the backward by itself."""

    managed = False


@pytest.mark.parametrize("kind", ["Turns", "OwnTurns"])
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_network_that_no_rank_used_keeps_its_weights(kind, zero_stage):
    name, trainer = f"tests.zero.test_missing:{kind}", {"max_epochs": 1}
    wanted = reference(name, {}, trainer)
    for got in run(train, name, 2, {"zero_stage": zero_stage, "quiet": True}, {}, trainer, world=2):
        for key, weight in wanted["weights"].items():
            torch.testing.assert_close(got["weights"][key], weight, rtol=1e-5, atol=1e-5)
