"""`Strategy3D(verify=...)` stays silent where all is well and finds what is planted."""

import os
import threading

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d import Precision3D, Strategy3D
from lightning_3d.errors import ConfigurationError, DivergenceError, UnsupportedError
from lightning_3d.sandbox.fingerprint import digest
from lightning_3d.verify.first_step import FirstStep
from tests.parity import QUIET, assert_parity, caught_warnings, in_turn, layouts, long, make_trainer, silent
from tests.workers import WorkerError, on_ranks, run
from tests.zoo.language import GPT
from tests.zoo.plain import MLP

LAYOUTS = {
    **layouts("zero0", "zero3", "tensor", "pipeline"),
    "all": (4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
}


# "all" has every axis but data, "zero3" has that
QUICK = [("zero3", "replicas"), ("all", "first_step")]
CASES = [
    pytest.param(layout, verify, marks=() if (layout, verify) in QUICK else pytest.mark.long)
    for layout in LAYOUTS
    for verify in ("first_step", "replicas")
]


@pytest.mark.parametrize(("layout", "verify"), CASES)
def test_silent_where_all_is_well(layout, verify):
    world, strategy = LAYOUTS[layout]
    flags = {"accumulate_grad_batches": 2, "max_epochs": 2} if verify == "first_step" else {"max_epochs": 6}
    assert_parity("GPT", world, {**strategy, "verify": verify}, trainer=flags)


class Wrong(GPT):
    """Its gradients are scaled once it is split and trains, or a weight drifts on rank 1."""

    drift = training_began = False

    def on_train_start(self):
        self.training_began = True

    def on_after_backward(self):
        if self.drift and os.environ["RANK"] == "1":
            weight = self.norm.weight
            (weight.to_local() if hasattr(weight, "to_local") else weight).data.add_(1e-6)

    def loss(self, batch):
        split = self.training_began and any(p.is_meta or hasattr(p, "to_local") for p in self.parameters())
        return super().loss(batch) * (1.01 if split and not self.drift else 1.0)


def _fit(kind, verify, drift, strategy, world):
    seed_everything(7, verbose=False)
    module = kind()
    module.drift = drift
    try:
        make_trainer(world, {**strategy, "verify": verify}, max_epochs=8, limit_val_batches=0).fit(module)
    except DivergenceError as error:
        return str(error)
    return None


@pytest.mark.parametrize("layout", ["zero3", "tensor", "pipeline"])
def test_a_wrong_scale_is_found_in_the_first_step(layout):
    world, strategy = LAYOUTS[layout]
    for said in run(_fit, Wrong, "first_step", False, strategy, world, world=world):
        assert said is not None
        assert "from the unsplit module's is 1.0e-02" in said


@pytest.mark.parametrize("layout", ["zero0", "tensor"])
def test_a_drifting_replica_is_named(layout):
    world, strategy = LAYOUTS[layout]
    for said in run(_fit, Wrong, "replicas", True, strategy, world, world=world):
        assert said is not None
        # tensor ranks share activations: what drifts on one bends the gradients of everything else
        first = "norm.weight" if layout == "zero0" else "positions.weight"
        assert f"before training batch 25, {first} is not the same on ranks 0 and 1" in said


class Counted(GPT):
    """A statistic in a buffer, of the batches of a data rank; on rank 1 also something else."""

    drift = True

    def __init__(self):
        super().__init__()
        self.register_buffer("seen_tokens", torch.zeros(()))

    def training_step(self, batch, batch_idx):
        self.seen_tokens += batch[0].float().mean() + (self.drift and os.environ["RANK"] == "1")
        return super().training_step(batch, batch_idx)


def test_a_drifting_buffer_is_named_among_ranks_that_saw_the_same():
    for said in run(_fit, Counted, "replicas", True, {"tensor_parallel_size": 2}, 2, world=2):
        assert "before training batch 25, seen_tokens is not the same on ranks 0 and 1" in said
    assert run(_fit, Counted, "replicas", False, {"zero_stage": 1}, 2, world=2) == [None, None]


@pytest.mark.long
@pytest.mark.parametrize("axis", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_copies_stay_equal_whose_gradients_travel_in_other_company(axis):
    """Norms on tensor ranks, tied tables on stages: int8 once rounded them by what stood beside them."""
    strategy = {axis: 2, "zero_stage": 0, "grad_compression": "int8"}
    assert run(_fit, Wrong, "replicas", False, strategy, 4, world=4) == [None] * 4


def test_unknown_values_are_refused():
    with pytest.raises(ConfigurationError, match="verify='always'"):
        Strategy3D(verify="always")


def test_digest_sees_order_and_bits():
    x = torch.arange(8.0)
    assert digest(x) == digest(x.clone())
    assert digest(x) != digest(x.flip(0))
    assert digest(x[:1]) != digest(x[:1].nextafter(torch.tensor(9.0)))


class Planted(MLP):
    """Loses its gradients to NaN, or computes something else, once it is split and trains."""

    factor = 1.0
    began = False

    def on_train_start(self):
        self.began = True

    def loss(self, batch):
        split = self.began and any(hasattr(p, "to_local") for p in self.parameters())
        return super().loss(batch) * (self.factor if split else 1.0)


class UsesTrainer(Planted):
    def training_step(self, batch, batch_idx):
        assert self.trainer.max_epochs
        assert self.optimizers().param_groups[0]["lr"] > 0
        return super().training_step(batch, batch_idx)


class Thawed(Planted):
    """A part is thawed, and another frozen, after the copy was made."""

    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)

    def on_train_start(self):
        self.net[0].requires_grad_(True)
        self.net[2].requires_grad_(False)


class Small(Planted):
    """Its gradients are too small for fp16, unless its loss is scaled."""

    def loss(self, batch):
        return super().loss(batch) * 1e-6


class Hooked(Planted):
    """What a hook sets after the copy was made: an attribute, a mode, a buffer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("shift", torch.zeros(8))

    def on_train_start(self):
        super().on_train_start()
        self.norm.eval()
        self.shift.fill_(0.3)
        self.steps = 0

    def on_train_batch_start(self, batch, batch_idx):
        self.steps += 1

    def loss(self, batch):
        return super().loss((self.norm(batch[0] + self.shift), batch[1])) * self.steps


class Consuming(Planted):
    """Takes its batch apart, and changes it in place."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {"x": batch[0].clone(), "y": batch[1]}

    def loss(self, batch):
        return super().loss((batch.pop("x").mul_(0.5), batch.pop("y")))


class Normed(Planted):
    """Keeps a weight with a graph in an attribute; its backward is its own."""

    def __init__(self):
        super().__init__()
        with silent():
            nn.utils.weight_norm(self.net[0])

    def backward(self, loss):
        (2 * loss).backward()


class Masked(Planted):
    """A hook of a gradient, and gradients of few rows."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 8, sparse=True)
        self.net[0].weight.register_hook(lambda grad: grad * 0.5)

    def loss(self, batch):
        return super().loss((batch[0] + self.table(torch.zeros(len(batch[0]), dtype=torch.long)), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _lose(stage):
    """Rank 1 loses a gradient."""
    reduced = FirstStep.compare

    def compare(self, parallel, group, scale):
        if os.environ["RANK"] == "1":
            parallel.module.net[0].weight.grad = None
        return reduced(self, parallel, group, scale)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FirstStep, "compare", compare)
        return _first_step(Planted, 1.0, None, 1, {"zero_stage": stage})


@pytest.mark.parametrize("stage", [long(0), 3])
def test_a_gradient_that_one_rank_lost_is_named(stage):
    for said, _ in run(_lose, stage, world=2):
        assert said is not None
        assert "(net.0.weight), relative to its norm" in said


class Locked(Planted):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class Closed(Planted):
    def __init__(self):
        super().__init__()
        self.inner = lambda x: self.net(x)

    def loss(self, batch):
        return (self.inner(batch[0]) - batch[1]).square().mean()


class Keys(GPT):
    """The gradient of a key's bias is zero, but for rounding."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(16, 4, 32, 0.0) for _ in range(2))
        for block in self.blocks:
            block.self_attn = Separate()


class Separate(nn.Module):
    batch_first = True

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, *args, **kwargs):
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)), None


def _first_step(kind, factor, scale, epochs=6, strategy=None):
    """What was raised and warned of."""
    seed_everything(7, verbose=False)
    module = kind()
    module.factor = factor
    plugins = [] if scale is None else [Precision3D("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))]
    strategy = Strategy3D(**(strategy or {"zero_stage": 1}), verify="first_step", quiet=True)
    flags = {"max_epochs": epochs, "limit_val_batches": 0, "plugins": plugins}
    with caught_warnings() as caught:
        try:
            Trainer(**{**QUIET, **flags, "devices": 2, "strategy": strategy}).fit(module)
        except (DivergenceError, UnsupportedError) as error:
            return str(error), ""
    return None, " ".join(text for text in caught if "verify=" in text)


NAN = float("nan")


@pytest.mark.parametrize("kind", in_turn([UsesTrainer, Thawed, Hooked, Consuming, Normed], 2))
def test_a_step_may_use_the_trainer_and_hooks_may_change_what_it_uses(kind):
    for found in run(_first_step, kind, 1.0, None, 1, world=2):
        assert found == (None, "")


def test_hooks_of_gradients_are_those_of_the_copy_too():
    for found in run(_first_step, Masked, 1.0, None, 1, {"zero_stage": 0}, world=2):
        assert found == (None, "")


def test_a_gradient_that_is_nothing_but_rounding_is_no_divergence():
    for said, _ in run(_first_step, Keys, 1.0, None, 1, {"pipeline_parallel_size": 2}, world=2):
        assert said is None


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Locked, "Locked cannot be copied (TypeError: cannot pickle '_thread.lock' object)"),
        (Closed, "where it failed (RuntimeError: it called Sequential of the module itself)"),
    ],
)
def test_what_cannot_be_copied_is_refused(kind, why):
    for said, _ in run(_first_step, kind, 1.0, None, 1, world=2):
        assert said is not None
        assert why in said


@pytest.mark.parametrize("scale", [None, 16.0])
def test_gradients_that_are_not_finite_are_found(scale):
    for said, _ in run(_first_step, Planted, NAN, scale, world=2):
        assert "of the first gradient of scale and that of the unsplit module only one is finite" in said


def test_the_first_step_is_the_first_that_does_not_overflow():
    for said, _ in run(_first_step, Planted, 2.0, 2.0**30, world=2):
        assert "from the unsplit module's is 1.0e+00" in said
    (_, messages), _ = run(_first_step, Planted, 2.0, 2.0**60, 1, world=2)
    assert "has compared nothing: gradients overflowed in all 5 steps" in messages


def test_small_gradients_do_not_vanish_in_the_copy():
    assert [said for said, _ in run(_first_step, Small, 1.0, 2.0**12, world=2)] == [None, None]


class Manual(MLP):
    automatic_optimization = False


@on_ranks(1, group=False)
def test_manual_optimization_is_refused():
    with pytest.raises(UnsupportedError, match="Manual optimizes manually"):
        make_trainer(1, {"verify": "first_step"}).fit(Manual())


class Largest(TorchDispatchMode):
    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.size = max(self.size, made.nbytes)
        return made


def test_digest_takes_little_memory():
    x = torch.randn(1 << 20)
    with Largest() as largest:
        found = digest(x)
    assert largest.size <= x.nbytes  # integers of a chunk at a time
    assert found == int((x.view(torch.int32) * (torch.arange(len(x), dtype=torch.int32) % 65521 * 2 + 1)).sum())


class OtherLoss(GPT):
    """Its loss is another one on the last rank, in one of several ways."""

    how = "twice"

    def loss(self, batch):
        loss = super().loss(batch)
        if int(os.environ["RANK"]) < int(os.environ["WORLD_SIZE"]) - 1:
            return loss
        ways = {
            "twice": lambda: loss * 2, "sum": lambda: loss * len(batch[0]), "nan": lambda: loss * torch.nan,
            "noise": lambda: loss + 0.01 * torch.rand((), generator=torch.Generator().manual_seed(1)),
        }  # fmt: skip
        return ways[self.how]()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)


@pytest.mark.parametrize("how", in_turn(["twice", "sum", "noise", "nan"], 4, 2))
@on_ranks(4, group=False)
def test_a_loss_of_one_tensor_rank_that_differs_is_an_error_on_all(how):
    seed_everything(1, verbose=False)
    module = OtherLoss()
    module.how = how
    with pytest.raises(DivergenceError, match="which have the same samples"):
        make_trainer(4, {"tensor_parallel_size": 2, "zero_stage": 1}, quiet=True, max_steps=2).fit(module)


class Penalised(GPT):
    """A penalty on what a layer inside of each block gives, which a hook keeps."""

    def __init__(self):
        super().__init__()
        self.kept = []
        for block in self.blocks:
            block.mlp[0].register_forward_hook(lambda *call: self.kept.append(call[-1].square().mean()))

    def loss(self, batch):
        self.kept.clear()
        return super().loss(batch) + 0.1 * sum(self.kept)


def test_a_hook_inside_of_a_block_that_meets_shards_is_named_and_the_remedy_works():
    name, strategy = f"{__name__}:Penalised", {"tensor_parallel_size": 2}
    with pytest.raises(WorkerError, match="hooks that take results of layers inside of a block"):
        assert_parity(name, 2, strategy, trainer={"max_epochs": 1})
    assert_parity(name, 2, {**strategy, "tensor_plan": {"blocks.*.mlp.*": "whole"}}, trainer={"max_epochs": 1})


class Running(GPT):
    """Scales its loss by a running maximum of its own samples, or of all ranks' samples."""

    reduces, begins = False, 0

    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.ones(()))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        most = loss.detach().clone()
        if self.reduces:
            torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
        self.largest.data.lerp_(most, 0.5 * (batch_idx >= self.begins))
        self.log("loss", loss)
        return loss / self.largest


def said_of_buffers(reduces, strategy, world, begins=0):
    seed_everything(1, verbose=False)
    module = Running()
    module.reduces, module.begins = reduces, begins
    with caught_warnings() as said:
        make_trainer(world, strategy, quiet=True, max_steps=8).fit(module)
    return [text for text in said if "values of its own" in text]


@pytest.mark.parametrize("strategy", [{"zero_stage": 0}, {"zero_stage": 3}])
def test_buffers_of_the_samples_of_a_rank_are_said_once(strategy):
    (text,), others = run(said_of_buffers, False, strategy, 2, world=2)
    assert "(largest)" in text
    assert not others
    assert run(said_of_buffers, True, strategy, 2, world=2) == [[], []]


def test_a_buffer_that_is_first_written_in_a_later_step_is_said():
    assert [len(said) for said in run(said_of_buffers, False, {"zero_stage": 1}, 2, 1, world=2)] == [1, 0]
