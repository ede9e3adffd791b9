"""Parameters that FSDP2 cannot shard are replicated, and train as on one device."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_3d.module.anatomy import Anatomy
from lightning_3d.zero.fsdp_unit_private import hook_outputs
from lightning_3d.zero.shard_units import shard_units, unshardable
from tests.parity import assert_parity, refused_by_both
from tests.zoo.base import Base
from tests.zoo.odd_blocks import Experts
from tests.zoo.plain import MLP
from tests.zoo.sized import Residual


class Odd(MLP):
    """Has weights whose gradients are sparse, and one with no elements."""

    def __init__(self):
        super().__init__()
        self.table, self.bag = nn.Embedding(20, 8, sparse=True), nn.EmbeddingBag(20, 8, sparse=True)
        self.nothing = nn.Parameter(torch.empty(0))

    def loss(self, batch):
        x, y = batch
        ids = (x.abs() * 5).long().clamp(max=19)
        x = x + self.table(ids).sum(1) + self.bag(ids) + self.nothing.sum()
        return F.mse_loss(self.net(x) * self.scale, y)

    def on_after_backward(self):
        for parameter in self.parameters():  # of sparse ones torch has no norm, which is compared
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_why():
    module = Odd()
    assert {name: unshardable([module]).get(parameter) for name, parameter in module.named_parameters()} == {
        **dict.fromkeys(name for name, _ in module.named_parameters()),
        "scale": "it is a scalar",
        "nothing": "it has no elements",
        "table.weight": "its gradients are sparse",
        "bag.weight": "its gradients are sparse",
    }


@pytest.mark.parametrize("stage", [1, 3])
def test_they_train_as_on_one_device(stage):
    assert_parity("tests.zero.test_units:Odd", 2, {"zero_stage": stage})


class Table(nn.Module):
    """Some of its rows, or all of them: the parameter itself."""

    def __init__(self, rows):
        super().__init__()
        self.inner = nn.Embedding(rows, 8)

    def forward(self, at=None):
        return self.inner.weight if at is None else self.inner(at)


class Scores(Base):
    """Scores all rows of a table, as models of knowledge graphs do."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList([Table(40), Table(20)])

    def tensors(self):
        generator = torch.Generator().manual_seed(1)
        given = torch.randint(0, 20, (self.samples, 2), generator=generator)
        return given, torch.randint(0, 40, (self.samples,), generator=generator)

    def loss(self, batch):
        given, wanted = batch
        mine = self.tables[0](given[:, 0]) * self.tables[1]()[given[:, 1]]
        return nn.functional.cross_entropy(mine @ self.tables[0]().view(40, 8).T, wanted)


@pytest.mark.parametrize("name", ["Scores", "Boxes", "Slots", "Thawed"])
def test_a_block_whose_output_hides_its_backward_is_gathered_for_it(name):
    """The memory of a returned parameter was freed behind its forward, and the next operation ended the process."""
    assert_parity(f"{__name__}:{name}", 2, {"zero_stage": 3})


class Recomputes(torch.autograd.Function):
    """Computes a block again in backward, from the inverse of its output where its input is freed."""

    @staticmethod
    def forward(ctx, block, frees, x, *weights):
        ctx.block, ctx.frees, ctx.x, ctx.weights = block, frees, x, weights
        with torch.no_grad():
            ctx.result = block(x.detach())
        if frees:
            x.untyped_storage().resize_(0)
        return ctx.result

    @staticmethod
    def backward(ctx, grad):
        if ctx.frees:
            with torch.no_grad():
                ctx.x.untyped_storage().resize_(ctx.x.nbytes)
                ctx.x.set_(ctx.block.inverse(ctx.result))
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            result = ctx.block(x)
        return None, None, *torch.autograd.grad(result, (x, *ctx.weights), grad)


class Coupling(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        a, b = x.chunk(2, -1)
        return torch.cat([a + self.inner(b), b], -1).roll(4, -1)

    def inverse(self, y):
        b, a = y.chunk(2, -1)
        return torch.cat([a - self.inner(b), b], -1)


class Reversible(nn.Module):
    def __init__(self, frees):
        super().__init__()
        self.coupling, self.frees = Coupling(), frees

    def forward(self, x):
        return Recomputes.apply(self.coupling, self.frees, x, *self.coupling.parameters())


class Keeping(Base):
    """Reversible blocks that compute from their inputs again."""

    frees = False

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 2)
        self.blocks = nn.Sequential(*[Reversible(self.frees) for _ in range(3)])

    def tensors(self):
        generator = torch.Generator().manual_seed(1)
        return torch.randn(self.samples, 3, generator=generator), torch.arange(self.samples) % 2

    def loss(self, batch):
        return nn.functional.cross_entropy(self.last(self.blocks(self.first(batch[0]) * 1.0)), batch[1])


class Freeing(Keeping):
    """The same, without the memory of inputs, as memcnn does by default."""

    frees = True


class Flow(nn.Linear):
    """Adds to its second argument, as flows do with the logarithm of a determinant."""

    in_place = True

    def forward(self, pair):
        x, total = pair
        x = x + super().forward(x).tanh()
        if self.in_place:
            total += x.sum(1)
        return x, total if self.in_place else total + x.sum(1)


class Remedied(Flow):
    in_place = False


class Flows(Keeping):
    kind = Flow

    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[self.kind(8, 8) for _ in range(3)])

    def loss(self, batch):
        x = self.first(batch[0])
        x, total = self.blocks((x, x.sum(1)))
        return nn.functional.cross_entropy(self.last(x), batch[1]) + total.square().mean()


class RemediedFlows(Flows):
    kind = Remedied


FREES, CHANGES = "Reversible.forward frees the memory", "A block changes an argument in place"


@pytest.mark.parametrize(
    ("name", "says", "stage", "instead"),
    [("Freeing", FREES, 1, "Keeping"), ("Freeing", FREES, 3, "Keeping"), ("Flows", CHANGES, 3, "RemediedFlows")],
)
def test_a_block_that_frees_or_changes_what_it_is_given_is_refused(name, says, stage, instead):
    with refused_by_both(f"{says} .*zero_stage=0"):
        assert_parity(f"{__name__}:{name}", 2, {"zero_stage": stage})
    assert_parity(f"{__name__}:{name}", 2, {"zero_stage": 0})
    assert_parity(f"{__name__}:{instead}", 2, {"zero_stage": stage})


class Classes(Keeping):
    """As many layers as classes, and as features."""

    def __init__(self):
        super().__init__()
        self.blocks, self.last = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 3)

    def loss(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])

    def encoded(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return x

    def forward(self, x):
        return self.last(self.encoded(self.first(x)))


class Chosen(Classes):
    """The weight beside the list is read before it is done, or with it."""

    def forward(self, x):
        x = self.first(x)
        for block, share in zip(self.blocks, self.last(x).softmax(-1).unbind(-1), strict=True):
            x = x + block(x).tanh() * share[:, None]
        return x


class Stopped(Classes):
    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x).tanh()
            if self.last(x).max() > 3:
                break
        return x


@pytest.mark.parametrize("kind", [Chosen, Stopped])
def test_only_a_weight_that_is_read_before_a_list_makes_it_a_list_of_experts(kind):
    """A list that stays gathered is named, with the way out. Layers beside as many classes are units."""
    module, chosen = Classes(), kind()
    assert shard_units(module, Anatomy.of(module), freed=True, warns=True) == list(module.blocks)  # no warning
    with pytest.warns(UserWarning, match="'blocks' may be a list of experts.*nn.Sequential"):
        assert not shard_units(chosen, Anatomy.of(chosen), freed=True, warns=True)
    chosen.blocks = nn.Sequential(*chosen.blocks)
    assert shard_units(chosen, Anatomy.of(chosen), freed=True, warns=True) == list(chosen.blocks)


def test_layers_beside_as_many_classes_train_as_on_one_device():
    assert_parity(f"{__name__}:Classes", 2, {"zero_stage": 3})


class Boxed(nn.Linear):
    """Returns an object that no walk enters."""

    def forward(self, box):
        return SimpleNamespace(x=super().forward(box.x).tanh())


class Boxes(Keeping):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[Boxed(8, 8) for _ in range(3)])

    def loss(self, batch):
        box = self.blocks(SimpleNamespace(x=self.first(batch[0])))
        return nn.functional.cross_entropy(self.last(box.x), batch[1])


class Gated(Keeping):
    def __init__(self):
        super().__init__()
        self.blocks = Experts(8)
        self.blocks.router = nn.Sequential(nn.Linear(8, 8), self.blocks.router)


def test_a_gate_of_several_layers_is_gathered_with_its_experts():
    assert_parity(f"{__name__}:Gated", 2, {"zero_stage": 3})


class Slots(Base):
    """Blocks that run twice and change what a linear layer returned, which is a view for three dimensions."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(8, 64), nn.ReLU(inplace=True), nn.Linear(64, 8))
        self.scale = nn.Parameter(torch.ones(8))

    def tensors(self):
        return (torch.randn(self.samples, 4, 8, generator=torch.Generator().manual_seed(0)),)

    def loss(self, batch):
        (x,) = batch
        wanted = x.sin()
        for block in self.blocks:
            x = x + block(x).relu_()
        x = x + self.mlp(x) * self.scale
        return F.mse_loss(x + self.mlp(x), wanted)


class Noting(Residual):
    """Adds a term of the loss to a list, and a value for later blocks to a dict."""

    def forward(self, x, terms, kept):
        h = self.up(x).tanh()
        terms.append(h.square().mean())
        return x + self.down(h) * kept.setdefault("first", h.mean(-1, keepdim=True))


class Notes(Slots):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Noting() for _ in range(3))

    def loss(self, batch):
        x, terms, kept = batch[0] * self.scale, [], {}
        for block in self.blocks:
            x = block(x, terms, kept)
        return F.mse_loss(self.mlp(x), batch[0].sin()) + sum(terms)


@pytest.mark.parametrize("strategy", [{"zero_stage": 3}, {"tensor_parallel_size": 2}])
def test_blocks_that_write_into_their_arguments(strategy):
    assert_parity(f"{__name__}:Notes", 2, strategy)


class Thawed(Slots):
    """The first block is frozen, and a hook has its output need a gradient, as adapters do for checkpoints."""

    def __init__(self):
        super().__init__()
        self.blocks[0].requires_grad_(False).register_forward_hook(lambda block, args, output: output.requires_grad_())

    def loss(self, batch):
        return F.mse_loss(nn.Sequential(*self.blocks, self.mlp)(batch[0]), batch[0].sin())


def test_a_parameter_keeps_no_hook_of_each_step_that_returns_a_view_of_it():
    state, rows = SimpleNamespace(_register_pre_backward_hook=None, _pre_backward=None), nn.Parameter(torch.ones(4, 8))
    hook_outputs(state)
    for _ in range(2):
        state._register_pre_backward_hook(rows[:2])
    assert not rows._backward_hooks
