"""What other trainers got wrong at least once, each by name. (Traps with a home of their own are tested there.)"""

import math

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_3d import Strategy3D
from tests.parity import QUIET, assert_parity, in_turn, layouts, long, make_trainer
from tests.workers import on_ranks, run
from tests.zoo.language import GPT, UntiedGPT

LAYOUTS = {
    **layouts("zero0", "zero2"),
    "pipeline": (2, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "pipeline-zero3": (4, {"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 3}),
    **layouts("tensor-pipeline", "tensor-zero1"),
}


class Closed(LightningModule):
    """Two weights of 1, input 1, target 0: the gradient of either is 2, whatever the batch size."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.first.weight)
        nn.init.ones_(self.second.weight)

    def training_step(self, batch, batch_idx):
        return self.second(self.first(batch)).square().mean()

    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)

    def train_dataloader(self):
        return DataLoader([torch.ones(4, 1)] * 4, batch_size=None)

    val_dataloader = train_dataloader

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _closed(world, strategy, accumulate, evaluate):
    module = Closed()
    flags = {"limit_train_batches": accumulate, "accumulate_grad_batches": accumulate, "max_epochs": 1}
    flags |= {"val_check_interval": 1, "limit_val_batches": 1} if evaluate else {"limit_val_batches": 0}
    make_trainer(world, strategy, **flags).fit(module)
    return [float(module.first.weight), float(module.second.weight)]


WIDE = [name if name in ("zero2", "tensor-pipeline") else long(name) for name in LAYOUTS]


@pytest.mark.parametrize("layout", ["zero0", "zero2", "pipeline", "pipeline-zero3"])
@pytest.mark.parametrize(("accumulate", "evaluate"), in_turn([(1, False), (2, False), (4, True)], 3, 2))
def test_microbatches_accumulation_and_evaluation_scale_no_gradient(layout, accumulate, evaluate):
    world, strategy = LAYOUTS[layout]
    for weights in run(_closed, world, strategy, accumulate, evaluate, world=world):
        assert weights == pytest.approx([0.8, 0.8], abs=1e-6)


class Masked(GPT):
    """The mean over tokens that count, of which every rank and microbatch has another number."""

    def tensors(self):
        (tokens,) = super().tensors()
        kept = torch.arange(1, 10) <= torch.arange(self.samples)[:, None] % 8 + 1
        return torch.where(kept, tokens, 0), kept

    def loss(self, batch):
        tokens, kept = batch
        target = tokens[:, 1:].masked_fill(~kept[:, 1:], -100)
        counted = (target != -100).sum().float()
        total = F.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), target.flatten(), reduction="sum")
        return total / self.trainer.strategy.reduce(counted, reduce_op="mean")


@pytest.mark.parametrize("layout", WIDE)
def test_a_mean_over_tokens_with_uneven_masks_is_that_of_the_whole_batch(layout):
    assert_parity(f"{__name__}:Masked", *LAYOUTS[layout], trainer={"max_epochs": 1})


class TurnsNaN(UntiedGPT):
    """If it is told to, in the fourth batch."""

    bad = False

    def loss(self, batch):
        loss = super().loss(batch)
        return loss * math.nan if self.bad and self.trainer.global_step == 3 else loss


def _detect(strategy):
    module = TurnsNaN()
    module.bad = True
    flags = {"devices": 2, "strategy": Strategy3D(**strategy, timeout=60.0), "detect_anomaly": True}
    with pytest.raises(RuntimeError, match="returned nan values"):
        Trainer(**{**QUIET, **flags, "max_epochs": 1, "limit_val_batches": 0}).fit(module)
    return module.trainer.global_step


@pytest.mark.parametrize("axis", ["tensor_parallel_size", long("data_parallel_size")])
def test_anomalies_are_looked_for_in_gradients_of_shards(axis):
    assert_parity(f"{__name__}:TurnsNaN", 2, {axis: 2}, trainer={"detect_anomaly": True, "max_epochs": 1})
    assert run(_detect, {axis: 2}, world=2) == [3, 3]


class Ones(Callback):
    """Makes every element of every gradient 1 and asks for the norm."""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        for parameter in module.parameters():
            if parameter.grad is not None:
                grad = parameter.grad
                (grad.to_local() if hasattr(grad, "to_local") else grad).fill_(1.0)
        self.norms = [float(trainer.strategy.grad_norm(kind)) for kind in (1.0, 2.0, math.inf)]


def _ones(world, strategy):
    ones, module = Ones(), GPT()
    make_trainer(world, strategy, max_steps=1, callbacks=[ones]).fit(module)
    return ones.norms, sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("layout", WIDE)
def test_a_norm_counts_ties_once_and_not_their_copies(layout):
    """sqrt(800) and not sqrt(1600): ties stand on two stages, norms on all tensor ranks, everything on data ranks."""
    world, strategy = LAYOUTS[layout]
    for norms, elements in run(_ones, world, strategy, world=world):
        assert norms == pytest.approx([elements, math.sqrt(elements), 1.0], rel=1e-6)


class Bits(Callback):
    """What this rank holds of the tied weight, whole, before the module is put together again."""

    def on_train_end(self, trainer, module):
        held = {"embed": module.embed.weight, "head": module.head.weight}
        parallel = trainer.strategy._parallel
        self.held = {name: parallel.parameters.full(p, p.detach()).clone() for name, p in held.items() if not p.is_meta}


def _tied(strategy):
    seed_everything(7, verbose=False)
    bits, module = Bits(), GPT()
    make_trainer(4, strategy, max_steps=20, callbacks=[bits], limit_val_batches=0).fit(module)
    return bits.held


@pytest.mark.parametrize("stage", [*(long(stage) for stage in range(3)), 3])
def test_tied_copies_on_two_stages_stay_bit_equal_for_20_adam_steps(stage):
    results = run(_tied, {"pipeline_parallel_size": 2, "zero_stage": stage}, world=4)
    copies = [copy for held in results for copy in held.values()]
    assert len(copies) >= 4
    assert all(torch.equal(copy, copies[0]) for copy in copies)


class Vocabulary10(GPT):
    vocabulary = 10


@pytest.mark.parametrize("sequence_parallel", [long(False), True])
def test_a_vocabulary_of_10_on_3_ranks(sequence_parallel):
    strategy = {"tensor_parallel_size": 3, "sequence_parallel": sequence_parallel}
    assert_parity(f"{__name__}:Vocabulary10", 3, strategy, trainer={"max_epochs": 1})


class UntiedVocabulary11(UntiedGPT):
    vocabulary = 11


def test_a_vocabulary_of_11_on_2_of_4_ranks():
    strategy = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert_parity(f"{__name__}:UntiedVocabulary11", 4, strategy, trainer={"max_epochs": 1})


def test_norms_of_a_divided_sequence_stay_bit_equal_for_20_steps():
    strategy = {"tensor_parallel_size": 2, "sequence_parallel": True}
    one, two = assert_parity("Llama", 2, strategy, trainer={"max_epochs": 4}, steps=20)
    norms = [name for name in one["weights"] if "norm" in name]
    assert len(norms) == 7
    assert all(torch.equal(one["weights"][name], two["weights"][name]) for name in norms)


class Apart(Callback):
    """The first weight of each block, as it was placed."""

    def on_train_start(self, trainer, module):
        blocks = [b for b in module.blocks if not b.c_proj.weight.is_meta]
        parallel = trainer.strategy._parallel
        self.firsts = [parallel.parameters.full(p, p.detach()).clone() for p in (b.c_proj.weight for b in blocks)]


def _apart(strategy):
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 5)
    apart, module = Apart(), GPT()
    make_trainer(2, strategy, max_steps=1, callbacks=[apart], limit_val_batches=0).fit(module)
    return apart.firsts


def test_stages_do_not_start_from_the_same_weights():
    one, two = run(_apart, {"pipeline_parallel_size": 2}, world=2)
    firsts = [*one, *two]
    assert len(firsts) == 3
    assert not any(torch.equal(a, b) for i, a in enumerate(firsts) for b in firsts[:i])


class Looks(Closed):
    """Notes the gradients as its hook finds them; one parameter is never used, so that its bucket stays open."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        return super().training_step(batch * (1 + self.global_rank), batch_idx)

    def on_after_backward(self):
        self.seen.append(float(self.first.weight.grad))


@on_ranks(2, group=False)
def test_a_hook_after_backward_sees_the_gradients_of_all_ranks():
    module = Looks()
    make_trainer(2, {"zero_stage": 0}, max_steps=1, limit_val_batches=0).fit(module)
    assert module.seen == [5.0]  # the mean of 2 and 2 x 2 squared


class ConvertsHead(UntiedGPT):
    """Converts a weight in each step to the type that it has, as proxies of metric learning do."""

    def training_step(self, batch, batch_idx):
        self.head.weight.data = self.head.weight.data.to(torch.float32)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("layout", ["zero2", long("tensor-pipeline")])
def test_a_weight_may_be_assigned_to_itself(layout):
    assert_parity(f"{__name__}:ConvertsHead", *LAYOUTS[layout], trainer={"max_epochs": 3})
