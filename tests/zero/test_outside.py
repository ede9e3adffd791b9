"""ZeRO 3 frees large embeddings and heads while blocks run, and steps that read such a weight train as on one device."""

import copy

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_3d.ranks import talk
from lightning_3d.zero import shard_units
from tests.parity import assert_same, caught_warnings, in_turn, make_trainer, reference, train
from tests.workers import WorkerError, run
from tests.zero.test_streams import streamed
from tests.zoo.base import Base
from tests.zoo.language import Block, UntiedGPT

WIDTH, WORDS, LAYERS = 256, 4100, 3
ZERO3 = {"zero_stage": 3, "quiet": True}


class Large(UntiedGPT):
    """Notes the bytes of the embedding and of the head while blocks run, and what each step sends."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(WORDS, WIDTH), torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.positions, self.norm = torch.nn.Embedding(8, WIDTH), torch.nn.LayerNorm(WIDTH)
        self.blocks = torch.nn.ModuleList(Block(WIDTH, 4) for _ in range(LAYERS))
        self.full, self.held, self.sent, self.before = {}, [], [], 0
        for name in ("embed", "head"):
            getattr(self, name).register_forward_hook(lambda part, *_, name=name: self.full.update({name: part.weight}))
        for index, block in enumerate(self.blocks[:-1]):  # the head is gathered during the last one
            block.register_forward_hook(lambda block, args, out, index=index: self.note(f"forward {index}", out))

    def note(self, moment, out):
        self.held.append((moment, *(full.untyped_storage().nbytes() for full in self.full.values())))
        if out.requires_grad:
            out.register_hook(lambda grad: self.note(moment.replace("forward", "backward"), grad.detach()))

    def on_train_batch_end(self, *args):
        super().on_train_batch_end(*args)
        now = self.trainer.strategy.data_axis.ledger.bytes("data_parallel", "all_gather")
        self.sent, self.before = [*self.sent, now - self.before], now


def weighed(accelerator="cpu"):
    """Bytes held at each moment, bytes sent in each step, and bytes outside of the blocks and in them."""
    module = Large()
    outside = sum(p.nbytes for name, p in module.named_parameters() if not name.startswith("blocks."))
    blocks = sum(p.nbytes for p in module.blocks.parameters())
    make_trainer(2, ZERO3, accelerator=accelerator, max_steps=3, limit_val_batches=0).fit(module)
    return module.held, module.sent, outside, blocks


@pytest.mark.parametrize("streams", [False, True])
def test_nothing_of_them_is_held_while_blocks_run_and_each_is_gathered_once(streams):
    assert_freed(run(streamed, weighed, world=2) if streams else run(weighed, world=2))


def assert_freed(ranks):
    """Nothing outside of the blocks was held while they ran, and each rank sent its half of each gather."""
    for held, sent, outside, blocks in ranks:
        moments = {moment for moment, *_ in held}
        assert moments == {f"{way} {index}" for way in ("forward", "backward") for index in range(LAYERS - 1)}
        assert len(held) == 3 * len(moments)
        assert all(each == 0 for _, *bytes_ in held for each in bytes_), held
        # blocks are gathered for forward and for backward, the rest once
        assert sent == [(outside + 2 * blocks) / 2] * 3


class Reads(Base):
    """A language model whose step does one thing more with its embedding or its head."""

    way = ""

    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(30, 16), torch.nn.Linear(16, 30)
        self.blocks = torch.nn.ModuleList(Block(16, 4) for _ in range(2))
        self.steps = 0

    def tensors(self):
        return (torch.randint(0, 30, (self.samples, 9), generator=torch.Generator().manual_seed(3)),)

    def loss(self, batch):
        self.steps += self.training
        ids, wanted = batch[0][:, :-1], batch[0][:, 1:].flatten()
        before = getattr(self, f"before_{self.way}", lambda: 0.0)()
        x = checkpoint(self.embed, ids, use_reentrant=False) if self.way == "checkpoint" else self.embed(ids)
        first = x
        for block in self.blocks:
            x = block(x)
        logits = self.give(x)
        after = getattr(self, f"after_{self.way}", lambda x: 0.0)(first)
        return F.cross_entropy(logits.flatten(0, 1), wanted) + before + after

    def give(self, x):
        if self.way == "tied":
            return F.linear(x, self.embed.weight, self.head.bias)
        if self.way == "chunks":  # as many as the ranks please
            return torch.cat([self.head(part) for part in x.chunk(2 + self.global_rank, dim=1)], dim=1)
        if self.way == "no_grad":
            with torch.no_grad():
                self.head(x)
        return self.head(x)

    def before_penalty(self):
        return self.head.weight.square().mean()

    def after_held(self, first):
        return self.head.weight.square().mean() + self.head(first).mean()

    def after_iterated(self, first):
        return sum(p.square().mean() for p in self.head.parameters())

    def after_linear(self, first):
        return F.linear(first, self.head.weight).square().mean()

    def after_later(self, first):
        return self.embed.weight.square().mean() if self.steps > 3 else 0.0

    def after_twice(self, first):
        return (self.embed.weight[:3] * self.embed(torch.arange(3, device=first.device))).sum()

    def after_logged(self, first):
        if self.global_rank == 0:  # which alone keeps the weight for it
            float(self.head.weight.norm())
        return 0.0

    def after_alone(self, first):
        return self.embed.weight.sum() if self.global_rank == 0 else 0.0


WAYS = ["plain", "tied", "chunks", "no_grad", "checkpoint", "penalty", "held", "iterated", "linear", "later", "twice",
        "logged"]  # fmt: skip


def _all_apart(function, *args):
    shard_units.APART_BYTES = 0
    return function(*args)


@pytest.mark.parametrize("way", in_turn(WAYS, 2))
def test_steps_that_read_weights_train_as_on_one_device(way):
    attributes = {"way": way, "optimizer": "plain_sgd"}
    flags = {"max_epochs": 2, "gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    wanted = reference(f"{__name__}:Reads", attributes, flags)
    assert_same(run(_all_apart, train, f"{__name__}:Reads", 2, ZERO3, attributes, flags, world=2), wanted, 1e-5)


def _alone():
    talk.PATIENCE = 2.0
    module = Reads()
    module.way = "alone"
    make_trainer(2, ZERO3, max_steps=2).fit(module)


@pytest.mark.long
def test_a_rank_that_reads_alone_says_so():
    with pytest.raises(WorkerError, match=r"reads a parameter of embed without a call of embed.*not on rank 1"):
        run(_all_apart, _alone, world=2)


class Follower(Reads):
    """Two backwards in a step, by hand; the second one reads a weight too."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for way in ("plain", "held"):
            self.way = way
            loss = self.step_by_hand(self.optimizers(), batch)
        self.log("loss", loss, sync_dist=True)


def test_two_backwards_in_a_step():
    attributes, flags = {"optimizer": "plain_sgd"}, {"max_epochs": 2}
    wanted = reference(f"{__name__}:Follower", attributes, flags)
    assert_same(run(_all_apart, train, f"{__name__}:Follower", 2, ZERO3, attributes, flags, world=2), wanted, 1e-5)


def _left():
    seed_everything(0, verbose=False)
    module = Reads()
    before = copy.deepcopy(module.embed)
    trainer = make_trainer(2, ZERO3, max_steps=2, limit_val_batches=0)
    copies, within = [], set()

    def note(*_):
        copies.append(copy.deepcopy(module.embed))
        within.update(type(part._parameters) for part in (module.embed, module.head))

    module.on_train_batch_end = note
    with caught_warnings() as warned:
        trainer.fit(module)
    assert not [text for text in warned if "view tensor" in text]  # of which FSDP2 warns
    assert dict not in within
    return [type(part._parameters) for part in (module.embed, module.head, *copies)], type(before._parameters)


def test_nothing_is_left_of_them_after_training():
    for found, plain in run(_all_apart, _left, world=2):
        assert set(found) == {plain} == {dict}
