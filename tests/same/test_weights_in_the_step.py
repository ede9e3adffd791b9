"""Steps that compute with weights themselves train as on one device, or are refused with a remedy."""

import copy
import re
from functools import partial

import numpy
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, hessian, jvp, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from lightning_3d import errors
from lightning_3d.module.anatomy import place_of
from lightning_3d.sandbox.interceptor import overlap
from lightning_3d.tensor.vocabulary import find_vocabulary
from lightning_3d.usercode.kept_weights import swap_kept, warn_of_lookups
from tests.parity import assert_parity, assert_same_fit, fit_with, long, refused_by_both, train
from tests.workers import WorkerError, run
from tests.zoo.carried import Chain
from tests.zoo.plain import MLP


class Penalized(MLP):
    """A sum over all weights in the step."""

    def loss(self, batch):
        return super().loss(batch) + 1e-2 * sum(parameter.square().sum() for parameter in self.parameters())


class PenalizedByHand(MLP):
    """By the gradient of a penalty."""

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(parameter.detach(), alpha=2e-2)


class PenalizedInPlace(MLP):
    """The same, added up in place: DTensor refuses that by an assertion without a text."""

    def loss(self, batch):
        total = torch.zeros(1)
        for parameter in self.parameters():
            total += parameter.square().sum()
        return super().loss(batch) + 1e-2 * total.squeeze()


class CallsClosure(Penalized):
    """Runs the step itself, as Lightning's page of `optimizer_step` has it for steps without an update."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        optimizer_closure()
        optimizer.step()


class ByOneInput(MLP):
    """A backward that reaches one tensor."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer, x = self.optimizers(), torch.ones(3, requires_grad=True)
        self.manual_backward(x.square().sum(), inputs=x)
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()


class Orthogonal(MLP):
    """The penalty of PEFT's AdaLoRA. torch makes an identity of a shard's rows, and raises about sizes."""

    def loss(self, batch):
        loss, weight = super().loss(batch), self.net[0].weight
        covariance = weight @ weight.T
        identity = torch.eye(*covariance.size(), out=torch.empty_like(covariance))
        return loss + 1e-2 * (covariance - identity).norm()


class Twins(MLP):
    """Two parameters of one memory, one of them transposed, as PEFT ties the adapters of an embedding and a head."""

    def __init__(self):
        super().__init__()
        self.net.insert(2, nn.Linear(24, 24))
        self.net[2].weight.data = self.net[3].weight.data.T


class Aliased(MLP):
    """A view of a weight in an attribute, which a copy would not follow."""

    def __init__(self):
        super().__init__()
        self.kept = [self.net[2].weight.detach()]


class Listed(MLP):
    """Lists its parameters by a method of its own, as TorchRL's losses do."""

    def __init__(self):
        super().__init__()
        self.net = ListedChain(*self.net)


class Scripted(MLP):
    def __init__(self):
        super().__init__()
        self.net[1] = torch.jit.script(nn.Tanh())


class ListedChain(nn.Sequential):
    def named_parameters(self, prefix="", recurse=True):
        yield from super().named_parameters(prefix, recurse)


class Normed(MLP):
    """An attribute that begins as the weight, and is computed in each forward."""

    def __init__(self):
        super().__init__()
        nn.utils.spectral_norm(self.net[2])


class Sliced(MLP):
    """Reads rows of a block's weight outside of the block."""

    def loss(self, batch):
        x, y = batch
        return F.mse_loss(self.net(x) * self.scale + F.linear(x, self.net[0].weight[:1]), y)


class Differentiated(MLP):
    def loss(self, batch):
        x, y = batch[0].clone().requires_grad_(), batch[1]
        out = self.net(x) * self.scale
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.mse_loss(out, y) + slope.square().mean()


class Learned(MLP):
    """Meta-learning: each sample's loss after a step on it, by which the weights before it are differentiated."""

    def loss(self, batch):
        return torch.stack([self.after(*sample) for sample in zip(*batch, strict=True)]).mean()

    def after(self, x, y):
        weights = dict(self.net.named_parameters())
        inner = F.mse_loss(functional_call(self.net, weights, (x,)), y)
        slopes = torch.autograd.grad(inner, [*weights.values()], create_graph=True)
        after = {name: weights[name] - 0.1 * slope for name, slope in zip(weights, slopes, strict=True)}
        return F.mse_loss(functional_call(self.net, after, (x,)) * self.scale, y)


class Adjoint(torch.autograd.Function):
    """Computes gradients in its backward, as torchdiffeq's `odeint_adjoint` does."""

    @staticmethod
    def forward(ctx, function, x, *parameters):
        ctx.function = function
        ctx.save_for_backward(x, *parameters)
        return function(x)

    @staticmethod
    def backward(ctx, grad):
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            out = ctx.function(x)
        return None, None, *torch.autograd.grad(out, parameters, grad, allow_unused=True)


class ByAdjoint(MLP):
    def loss(self, batch):
        x, y = batch
        return F.mse_loss(Adjoint.apply(self.net, x, *self.net.parameters()) * self.scale, y)


class Quarter(MLP):
    """Differentiates the loss by a weight, to weigh another loss by it (VQGAN)."""

    def loss(self, batch):
        loss = super().loss(batch)
        (slope,) = torch.autograd.grad(loss, self.net[2].weight, retain_graph=True, allow_unused=True)
        return loss if slope is None else loss / 4


class Called(MLP):
    def loss(self, batch):
        x, y = batch
        weights = {name: 1.01 * weight for name, weight in self.net.named_parameters()}
        return F.mse_loss(functional_call(self.net, weights, (x,)) * self.scale, y)


class Transformed(MLP):
    """Derivatives by inputs in transforms of `torch.func`, from step `since` on."""

    since = 0

    def loss(self, batch):
        x, y = batch
        if self.global_step < self.since:
            return super().loss(batch)
        out, slope = jvp(lambda x: self.net(x) * self.scale, (x,), (torch.ones_like(x),))
        curved = vmap(hessian(lambda x: (self.net(x) * self.scale).sum()))(x)
        return F.mse_loss(out, y) + slope.square().mean() + curved.square().mean()


class TransformedByBatch(MLP):
    """Data ranks choose by their own batch between a transform and a plain call."""

    def loss(self, batch):
        x, y = batch
        if x[0, 0] > 0:
            return super().loss(batch)
        out, _ = jvp(lambda x: self.net(x) * self.scale, (x,), (torch.ones_like(x),))
        return F.mse_loss(out, y)


class TransformedLater(Transformed):
    since = 2


class ForwardMode(MLP):
    def loss(self, batch):
        x, y = batch
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x.clone().requires_grad_(), torch.ones_like(x))
            out, slope = forward_ad.unpack_dual(self.net(dual) * self.scale)
        return F.mse_loss(out, y) + slope.square().mean()


class Renewed(MLP):
    """Makes a parameter anew in each step, as some queues of negatives are."""

    def loss(self, batch):
        loss = super().loss(batch)
        self.net[2].weight = nn.Parameter(self.net[2].weight.detach() * 0.99)
        return loss


class Unit(nn.Module):
    """Takes what is known of an atom, and adds to it."""

    def __init__(self, width):
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 16), nn.Linear(16, 8)

    def forward(self, known):
        known["energy"] = self.outer(torch.tanh(self.inner(known.get("energy", known["positions"])))) / 2
        return known


class Slope(nn.Module):
    def forward(self, known):
        (slope,) = torch.autograd.grad(known["energy"].sum(), known["positions"], create_graph=True)
        return {**known, "forces": -slope}


class Forces(MLP):
    """One module computes an energy, and the next differentiates it by the positions, in one dict (SchNetPack)."""

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList([*(Unit(8) for _ in range(4)), Slope()])

    def loss(self, batch):
        known = {"positions": batch[0].clone().requires_grad_()}
        for part in self.net:
            known = part(known)
        once = F.mse_loss(known["energy"].sum(1, keepdim=True) * self.scale, batch[1]) + known["forces"].square().mean()
        return once + self.net[0](known)["energy"].square().mean()


class Delta(nn.Module):
    def __init__(self, delta):
        super().__init__()
        self.delta = delta

    def forward(self, weight):
        return weight + self.delta


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8, 8) / 4)

    def forward(self, x):
        return torch.einsum("bi,eio->beo", x, self.weight).tanh().mean(1)


class Adapter(nn.Module):
    """Parametrizes a frozen stack of experts for the time of its forward, as PEFT's LoRA on parameters does."""

    delta = Delta

    def __init__(self):
        super().__init__()
        self.base = Stacked().requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(4, 8, 2) / 4), nn.Parameter(torch.randn(4, 2, 8) / 4)

    def forward(self, x):
        parametrize.register_parametrization(self.base, "weight", self.delta(self.down @ self.up))
        self.base.parametrizations["weight"].original.requires_grad_(False)
        try:
            return x + self.base(x)
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


class Adapted(MLP):
    adapter = Adapter

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(self.adapter(), self.adapter(), nn.Linear(8, 1))


class Copied(MLP):
    """First-order meta-learning: a copy learns from each half of a batch, and its last gradient is the module's."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for x, y in zip(*(tensor.chunk(2) for tensor in batch), strict=True):
            fast = copy.deepcopy(self.net)  # of parameters that have a gradient, for the second half
            inner = torch.optim.SGD(fast.parameters(), 0.1)
            F.mse_loss(fast(x), y).backward()
            inner.step()
            loss = F.mse_loss(fast(x), y)
            for mine, grad in zip(
                self.net.parameters(), torch.autograd.grad(loss, list(fast.parameters())), strict=True
            ):
                mine.grad = grad if mine.grad is None else mine.grad + grad
        optimizer.step()
        self.log("loss", loss)


class Moving(Delta):
    """Changes the weight when it is put on it."""

    def right_inverse(self, weight):
        return weight - 0.1


class MovingAdapter(Adapter):
    delta = Moving


class Moved(Adapted):
    adapter = MovingAdapter


class Marked(MLP):
    """Gives its weights an attribute that hooks write, as opacus does."""

    def __init__(self):
        super().__init__()
        for part in self.net.modules():
            for weight in part.parameters(recurse=False):
                weight.calls = 0
            part.register_forward_hook(self.count)

    @staticmethod
    def count(part, *_):
        for weight in part.parameters(recurse=False):
            weight.calls += 1


class Parts(MLP):
    """Changes a row of one weight, and a column of another, and assigns to the `.data` of a third, and of all.

    These are views of one vector from then on.
    """

    def training_step(self, batch, batch_idx):
        with torch.no_grad():
            nn.utils.vector_to_parameters(0.9 * nn.utils.parameters_to_vector(self.parameters()), self.parameters())
            self.net[0].weight[0].mul_(0.5)
            self.net[2].weight[:, 1] = 0.0
            self.net[4].weight.data = F.normalize(self.net[4].weight.data)
        return super().training_step(batch, batch_idx)


class Recomputed(MLP):
    """A checkpointed region by the norm of a weight, which the backward reads again, as an array of numpy."""

    def loss(self, batch):
        norm = lambda: float(numpy.linalg.norm(self.net[2].weight.detach()))  # noqa: E731
        scores = checkpoint(lambda x: (x * norm()).tanh(), self.net(batch[0]), use_reentrant=False)
        return F.mse_loss(scores * self.scale, batch[1])


class CalledByOwn(MLP):
    """Gives each layer the weights that it has."""

    def loss(self, batch):
        hidden, y = batch
        for layer in self.net:
            hidden = functional_call(layer, dict(layer.named_parameters()), (hidden,))
        return F.mse_loss(hidden * self.scale, y)


HERE = "tests.same.test_weights_in_the_step:"


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("Penalized", {"zero_stage": 0}),
        ("Penalized", {"zero_stage": 2}),
        ("CallsClosure", {"zero_stage": 1}),
        ("ByOneInput", {"zero_stage": 1}),
        ("Twins", {"zero_stage": 0}),
        ("Listed", {"zero_stage": 0}),
        ("Normed", {"zero_stage": 1}),
        ("Orthogonal", {"zero_stage": 2}),
        ("Differentiated", {"zero_stage": 0}),
        ("Differentiated", {"zero_stage": 1}),
        ("Differentiated", {"tensor_parallel_size": 2}),
        long("Forces", {"zero_stage": 0}),
        long("Forces", {"zero_stage": 1}),
        long("Forces", {"zero_stage": 2}),
        ("Forces", {"zero_stage": 3}),
        long("Forces", {"tensor_parallel_size": 2}),
        ("Sliced", {"tensor_parallel_size": 2, "tensor_plan": {"net": "whole"}}),
        ("Copied", {"tensor_parallel_size": 2}),
        ("Learned", {"zero_stage": 0}),
        ("ByAdjoint", {"zero_stage": 0}),
        long("ByAdjoint", {"tensor_parallel_size": 2}),
        long("Called", {"zero_stage": 0}),
        ("Transformed", {"zero_stage": 3}),
        ("Transformed", {"tensor_parallel_size": 2}),
        ("TransformedLater", {"tensor_parallel_size": 2, "tensor_plan": {"net": "whole"}}),
        ("TransformedByBatch", {"zero_stage": 0}),
        ("ForwardMode", {"zero_stage": 3}),
        long("ForwardMode", {"tensor_parallel_size": 2}),
        long("Learned", {"tensor_parallel_size": 2}),
        ("Adapted", {"zero_stage": 1}),
        ("Adapted", {"zero_stage": 3}),
        long("Adapted", {"zero_stage": 2}),
        long("Adapted", {"tensor_parallel_size": 2}),
        ("Marked", {"zero_stage": 0}),
        ("Parts", {"tensor_parallel_size": 2}),
        ("Recomputed", {"zero_stage": 1}),
        ("PenalizedByHand", {"zero_stage": 3}),
        ("PenalizedByHand", {"tensor_parallel_size": 2}),
    ],
)
def test_trains_as_on_one_device(name, strategy):
    assert_parity(HERE + name, 2, strategy)


def test_stages_of_gathered_weights_train_by_functional_call():
    """A second microbatch meets weights that are gathered, and the shards that the call has put back."""
    assert_parity(HERE + "CalledByOwn", 4, {"zero_stage": 3, "pipeline_parallel_size": 2})


@pytest.mark.long
def test_neighbours_in_one_memory_are_two_tensors():
    """The weights of an RNN on CUDA, and columns of one matrix."""
    flat = torch.zeros(24)
    matrix = flat.view(4, 6)
    assert not overlap(flat[:10], flat[10:])
    assert not overlap(matrix[:, :3], matrix[:, 3:])
    assert overlap(matrix[:, :4], matrix[:, 3:])
    assert overlap(matrix, matrix.T)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_derivatives_accumulate(stage):
    """Between the batches of a window gradients are kept, also those of a graph of derivatives."""
    assert_parity(HERE + "Forces", 2, {"zero_stage": stage}, trainer={"accumulate_grad_batches": 2})


def refused(name, strategy):
    train(HERE + name, 2, strategy, {}, {})


@pytest.mark.parametrize(
    ("name", "strategy", "says"),
    [
        ("Penalized", {"zero_stage": 3}, "UnsupportedError: training_step computes with sharded weights"),
        ("Penalized", {"tensor_parallel_size": 2}, "UnsupportedError: training_step computes with sharded weights"),
        ("Learned", {"zero_stage": 3}, "training_step differentiates by a shard of .* Use zero_stage=0"),
        ("Moved", {"zero_stage": 1}, "WritesError: The step changes 'net.0.base.weight'"),
        ("Moved", {"zero_stage": 3}, "WritesError: The step changes 'net.0.base.weight'"),
        ("ByAdjoint", {"zero_stage": 1}, "UnsupportedError: training_step differentiates by a shard of"),
        ("Quarter", {"zero_stage": 3}, "UnsupportedError: training_step differentiates by a shard of"),
        ("Called", {"zero_stage": 1}, "WritesError: training_step, or a hook, puts another parameter in the place of"),
        ("Renewed", {"zero_stage": 1}, "WritesError: training_step, or a hook, puts another parameter in the place of"),
        (
            "Renewed",
            {"tensor_parallel_size": 2},
            "WritesError: training_step, or a hook, puts another parameter in the place of",
        ),
        ("Orthogonal", {"zero_stage": 3}, "UnsupportedError: training_step computes with sharded weights"),
        ("Listed", {"zero_stage": 1}, r"net \(ListedChain\) has a method named_parameters of its own"),
        ("Listed", {"pipeline_parallel_size": 2}, r"net \(ListedChain\) has a method named_parameters of its own"),
        ("Twins", {"zero_stage": 1}, "net.2.weight and net.3.weight have one memory"),
        ("Aliased", {"zero_stage": 3}, "net.2.weight and kept have one memory"),
        ("Twins", {"pipeline_parallel_size": 2}, "net.2.weight and net.3.weight have one memory"),
        ("Sliced", {"zero_stage": 3}, "UnsupportedError: training_step computes with sharded weights"),
        ("Sliced", {"tensor_parallel_size": 2}, 'tensor_plan={"name of the block": "whole"}'),
        ("Transformed", {"pipeline_parallel_size": 2}, "'net.0' is called in a transform of torch.func"),
        ("TransformedLater", {"tensor_parallel_size": 2}, "A transform of torch.func .* tensor_plan="),
        (
            "TransformedByBatch",
            {"zero_stage": 3},
            "Data ranks have called .* in a transform of torch.func.* zero_stage=0",
        ),
        # one rank alone meets it, and the other has its words
        ("TransformedLater", {"pipeline_parallel_size": 2}, r"'net\.\d' is called in a transform of torch.func"),
        ("Forces", {"pipeline_parallel_size": 2}, "PipelineSplitError: training_step takes derivatives by itself"),
        # removing a parametrization counts as a write of its own weight
        ("Adapted", {"pipeline_parallel_size": 2}, r"WritesError: The step changes 'net\.\d\.base\.weight'"),
        ("PenalizedInPlace", {"zero_stage": 3}, "UnsupportedError: training_step computes with sharded weights"),
        ("Marked", {"zero_stage": 3}, "UnsupportedError: training_step reads an attribute that code has given"),
        ("Scripted", {"zero_stage": 1}, r"net.1 \(RecursiveScriptModule\) is a module of TorchScript.* zero_stage=0"),
        ("Recomputed", {"zero_stage": 3}, "A hook of the backward, or what is recomputed there, reads"),
    ],
)
def test_what_needs_whole_weights_is_refused(name, strategy, says):
    with pytest.raises(WorkerError) as error:
        run(refused, name, strategy, world=2)
    assert len(re.findall(says, str(error.value))) == 2


class Keeps(MLP):
    """Keeps weights in plain lists, a closure, a dict and by their ids: for its loss, for hooks and the optimizer."""

    reads = "nothing"

    def __init__(self):
        super().__init__()
        self.kept = [*self.parameters()]
        self.some = [weight for weight in self.kept if weight.ndim > 1]
        self.rates = dict.fromkeys(self.some, 0.5)
        self.ids = {id(weight) for weight in self.some}
        self.closure = partial(list, tuple(self.some))

    def loss(self, batch):
        mine = {
            "kept": self.closure(),
            "list": self.some,
            "module": [weight for weight in self.parameters() if weight.ndim > 1],
        }
        return super().loss(batch) + 1e-2 * sum(weight.square().sum() for weight in mine.get(self.reads, ()))

    def on_before_optimizer_step(self, optimizer):
        for weight in self.parameters() if self.reads == "keys" else ():
            weight.grad.mul_(self.rates.get(weight, 1.0)) if weight.grad is not None else None
        if self.reads == "gradients":
            self.log("norms", sum(weight.grad.norm() for weight in self.some if weight.grad is not None))

    def on_train_batch_start(self, batch, batch_idx):
        for weight in self.some if self.reads == "freezes" else ():
            weight.requires_grad = batch_idx % 2 == 0

    def configure_optimizers(self):
        groups = {
            "shapes": [[p for p in self.kept if p.ndim > 1], [p for p in self.kept if p.ndim < 2]],
            "keys": [[p for p in self.parameters() if (id(p) in self.ids) is inside] for inside in (True, False)],
            "objects": [self.some, [p for p in self.parameters() if not any(p is each for each in self.some)]],
        }.get(self.reads, [self.kept])
        rates = [{"params": group, "lr": 1e-3 * at} for at, group in enumerate(groups, 1)]
        return torch.optim.Adam(rates, eps=1e-4)


@pytest.mark.parametrize(
    ("reads", "strategy"),
    [
        ("kept", {"zero_stage": 1}),
        ("kept", {"tensor_parallel_size": 2}),
        ("list", {"zero_stage": 1}),
        ("list", {"tensor_parallel_size": 2}),
    ],
)
def test_weights_that_code_has_kept_are_refused_in_steps_where_ranks_have_parts(reads, strategy):
    """What a closure has has no values and is not trained. Its penalty was zero without a word."""
    says = {
        "kept": r"code uses the object that .* was before set-up, which it has kept",
        "list": "with sharded weights",
    }
    with refused_by_both(says[reads]):
        run(train, f"{__name__}:Keeps", 2, strategy, {"reads": reads}, {"max_epochs": 1}, world=2)


@pytest.mark.parametrize(
    ("reads", "strategy"),
    [
        ("nothing", {"zero_stage": 1}),
        ("shapes", {"zero_stage": 3}),
        ("module", {"zero_stage": 0}),
        ("kept", {"zero_stage": 0}),
        ("gradients", {}),
        ("freezes", {}),
        ("objects", {"zero_stage": 3}),
        ("objects", {"pipeline_parallel_size": 2}),
        ("keys", {"zero_stage": 1}),
        ("keys", {"tensor_parallel_size": 2}),
        ("keys", {"pipeline_parallel_size": 2}),
    ],
)
def test_weights_that_code_has_kept_for_hooks_and_the_optimizer_train(reads, strategy):
    """Two of them are the remedies for steps: the weights of the modules, and `zero_stage=0`."""
    assert_parity(f"{__name__}:Keeps", 2, strategy, attributes={"reads": reads})


class Looks(MLP):
    def training_step(self, batch, batch_idx):
        return self.penalised(batch)

    def penalised(self, batch):
        return self.loss(batch) + sum(self.factors.get(weight, 0) * weight.sum() for weight in self.parameters())


def test_weights_as_keys_of_a_step_are_warned_of():
    module, new = Looks(), nn.Parameter(torch.zeros(1))
    module.factors, module.pair = dict.fromkeys(module.parameters(), 1.0), (1, next(module.parameters()))
    found = swap_kept([module], {next(module.parameters()): new})
    assert next(iter(module.factors)) is module.pair[1] is new
    with pytest.warns(match=r"training_step reads self\.factors, which has weights or their ids as keys"):
        warn_of_lookups(module, found, 1)


class Evaluates(Chain):
    """Logs a number of a weight, and changes weights in an evaluation step, or in a hook before it."""

    does, hook = "log", False

    def training_step(self, batch, batch_idx):
        self.log("size", self.blocks[1][0].weight.abs().mean(), sync_dist=True) if self.does == "log" else None
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.change() if not self.hook else None
        return self.loss(batch)

    def on_validation_batch_start(self, *_):
        self.change() if self.hook else None

    def change(self):
        weight = self.blocks[1][0].weight
        if self.does == "load":
            self.load_state_dict({name: value * 0.9 for name, value in self.state_dict().items()})
        elif self.does == "mask":
            weight.mul_(0.9 if self.hook else torch.full((8, 8), 0.9))
        else:
            self.log("size", weight.abs().mean(), sync_dist=True)


def _evaluates(does, hook=False):
    torch.manual_seed(1)
    module = Evaluates()
    module.does, module.hook = does, hook
    return module, module.batches(6)


ZERO = {stage: {"zero_stage": stage, "data_parallel_size": 2} for stage in (1, 3)}


@pytest.mark.parametrize("stage", ZERO)
def test_a_number_of_a_sharded_weight_that_is_logged_over_all_ranks_is_that_of_one_device(stage):
    build = partial(_evaluates, "log")
    (wanted,) = run(fit_with, build, None, {"validate": True}, world=1)
    for got in run(fit_with, build, ZERO[stage], {"validate": True}, world=2):
        assert_same_fit(got, wanted)


@pytest.mark.parametrize(
    ("does", "strategy"),
    [("load", ZERO[1]), ("load", {"pipeline_parallel_size": 2, "timeout": 20}), ("mask", ZERO[1]), ("mask", ZERO[3])],
)
def test_weights_that_an_evaluation_step_changes_are_refused_and_its_hook_changes_them(does, strategy):
    with refused_by_both(r"validation_step c.* Do so in on_validation_batch_start"):
        run(fit_with, partial(_evaluates, does), strategy, {"validate": True}, world=2)
    build = partial(_evaluates, does, True)
    (wanted,) = run(fit_with, build, None, {"validate": True}, world=1)
    for got in run(fit_with, build, strategy, {"validate": True}, world=2):
        assert_same_fit(got, wanted)


def test_an_array_of_the_user_is_refused_by_numpy_alone(monkeypatch):
    monkeypatch.setattr(errors.GivenArrays, "read_only", False)
    with pytest.raises(ValueError, match=r"^assignment destination is read-only$"), errors.explain_writes("a step"):
        numpy.broadcast_to(0, 2)[:] = 1


def cloned(module):
    """A copy whose weights are computed from those of `module`, as learn2learn makes one for an inner loop."""
    twin = module.__new__(type(module))
    weights = {name: each.clone() for name, each in module._parameters.items() if each is not None}
    modules = {name: cloned(each) for name, each in module._modules.items()}
    twin.__dict__ = {**vars(module), "_parameters": {**module._parameters, **weights}, "_modules": modules}
    return twin


class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8)) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Clones(MLP):
    """An inner step on a clone, and the network itself after it."""

    def __init__(self):
        super().__init__()
        self.net = Headed()

    def loss(self, batch):
        inner, (x, y) = cloned(self.net), batch
        owners = [(part, name) for part in inner.modules() for name in part._parameters]
        weights = [part._parameters[name] for part, name in owners]
        gradients = torch.autograd.grad(F.mse_loss(inner(x), y), weights, create_graph=True)
        for (part, name), weight, gradient in zip(owners, weights, gradients, strict=True):
            part._parameters[name] = weight - 0.1 * gradient
        return F.mse_loss(inner(x) * self.scale, y) + 0.1 * super().loss(batch)


@pytest.mark.parametrize("size", [1, 2])
def test_clones_for_an_inner_loop_have_weights_of_their_own(size):
    """Layers around a forward are attributes of a module, so clones had them too: the inner step changed nothing."""
    assert_parity(HERE + "Clones", size, {"tensor_parallel_size": size})


def test_a_name_with_dots_has_an_owner():
    """TorchRL's losses have weights of their networks in one module: tensor ranks ended in a KeyError."""
    module = nn.Sequential(nn.Linear(2, 2), nn.Module())
    module[1]._parameters = dict(module[0].named_parameters(prefix="0.net"))
    assert place_of(module, "1.0.net.weight") == (module[1], "0.net.weight")
    assert place_of(module, "0.weight") == (module[0], "weight")
    assert find_vocabulary(module, (), (), 2, ends=()) == {}


class Projects(MLP):
    """A projector and a frozen one. Tensor ranks divide each as a block, and ZeRO gathers its layers one by one."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 1))
        self.teacher, self.calls = copy.deepcopy(self.net).requires_grad_(False), 0

    def loss(self, batch):
        (x, y), self.calls = batch, self.calls + 1
        target = y + self.teacher(x)
        return F.mse_loss(self.net(x) if self.calls % 2 else self.net(x[:, None])[:, 0], target)


class ProjectsTokens(MLP):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 8))

    def loss(self, batch):
        x = batch[0][:, None].repeat(1, 4, 1)
        return F.mse_loss((x + self.net(x)).mean((1, 2)) * self.scale, batch[1][:, 0])


@pytest.mark.parametrize(("name", "options"), [("Projects", {}), ("ProjectsTokens", {"sequence_parallel": True})])
def test_layers_of_zero_within_a_block_of_tensor_ranks(name, options):
    """The block read them before ZeRO gathered them: frozen ones, and all in calls that the first batch did not show."""
    assert_parity(HERE + name, 4, {"zero_stage": 3, "tensor_parallel_size": 2, **options})


class Jacobian(MLP):
    """All rows at once, as free-form flows (zuko, FFJORD) have their trace."""

    def loss(self, batch):
        x = batch[0].requires_grad_()
        rows = torch.ones(2, len(x), 1)
        found = torch.autograd.grad(self.net(x), x, rows, create_graph=True, is_grads_batched=True)[0]
        return super().loss(batch) + found.square().mean()


def test_several_gradients_at_once_are_refused_by_tensor_ranks():
    with pytest.raises(WorkerError, match=r"several gradients at once .*zero_stage=0 with data ranks alone"):
        run(train, HERE + "Jacobian", 2, {"tensor_parallel_size": 2}, {}, {}, world=2)
    assert_parity(HERE + "Jacobian", 2, {"zero_stage": 0})
