"""Optimizers that are not torch's: what they compute from whole tensors, from all parameters, or draw."""

import pytest
import torch
from torch import optim

from lightning_3d.errors import UnsupportedError
from lightning_3d.optim.probe import KNOWN, Reach, needs_all_parameters, reach_of, tried
from lightning_3d.optim.sharded_steps import step_one_at_a_time
from lightning_3d.optim.stand_ins import StandIns
from tests.parity import assert_parity, caught_warnings, in_turn, layouts, make_trainer
from tests.workers import run
from tests.zoo.language import UntiedGPT
from tests.zoo.plain import MLP

LAYOUTS = layouts("tensor", "zero1", "zero3", "pipeline")


class Own(optim.Optimizer):
    """Steps one parameter at a time by what `direction` makes of its gradient. The group counts the steps, to warm up."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr, "steps": 0})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["steps"] += 1
            rate = group["lr"] * min(1.0, group["steps"] / 4)
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(self.direction(p, p.grad, self.state[p]), alpha=-rate)
        return loss

    def direction(self, p, grad, state):
        return grad


class Lion(Own):
    def direction(self, p, grad, state):
        mean = state.setdefault("mean", torch.zeros_like(p))
        update = torch.tanh(100 * (mean * 0.9 + grad * 0.1))  # a sign would round differently
        mean.lerp_(grad, 0.01)
        return update


class Lamb(Own):
    def direction(self, p, grad, state):
        square = state.setdefault("square", torch.zeros_like(p))
        square.mul_(0.9).addcmul_(grad, grad, value=0.1)
        update = grad / (square.sqrt() + 1e-4) + 0.01 * p
        trust = torch.where(p.norm() > 0, p.norm() / (update.norm() + 1e-6), 1.0)
        return update * trust


class LambInNumbers(Lamb):
    def direction(self, p, grad, state):
        update = grad + 0.01 * p
        size, change = p.norm().item(), update.norm().item()
        return update * (size / change if size > 0 and change > 0 else 1.0)


class Rows(Own):
    def direction(self, p, grad, state):
        square = grad.pow(2).mean(dim=-1, keepdim=True) if p.ndim > 1 else grad.pow(2)
        held = state.setdefault("square", torch.zeros_like(square))
        held.lerp_(square, 0.1)
        return grad / (held.sqrt() + 1e-4)


class Central(Own):
    def direction(self, p, grad, state):
        return grad - grad.mean(dim=tuple(range(1, p.ndim)), keepdim=True) if p.ndim > 1 else grad


class Cautious(Own):
    def direction(self, p, grad, state):
        mean = state.setdefault("mean", torch.zeros_like(p))
        mean.lerp_(grad, 0.1)
        mask = torch.sigmoid(1e6 * mean * grad)  # a step would round differently
        return mean * mask / mask.mean().clamp(min=1e-3)


class Langevin(Own):
    def direction(self, p, grad, state):
        return grad + 0.01 * torch.randn_like(p)


class Orthogonal(Own):
    def direction(self, p, grad, state):
        if p.ndim != 2:
            return grad
        x = grad / (grad.norm() + 1e-7)
        for _ in range(3):
            x = 1.5 * x - 0.5 * x @ x.T @ x
        return x


class Clipped(Own):
    def step(self, closure=None):
        loss = torch.enable_grad()(closure)()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for p in held:
            p.grad.mul_(torch.clamp(0.1 / norm, max=1.0))
        super().step()
        return loss


class Adapts(Own):
    """A rate of all parameters that grows where gradients agree with those before, as in D-Adaptation and Prodigy."""

    rate, agreed = 1.0, 0.0

    def step(self, closure=None):
        loss, size = torch.enable_grad()(closure)(), 0.0
        for p in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            total = self.state[p].setdefault("total", torch.zeros_like(p))
            self.agreed += (p.grad * total).sum().item()
            size += total.add_(p.grad).abs().sum().item()
        self.rate = max(self.rate, self.agreed / size)
        super().step()
        return loss

    def direction(self, p, grad, state):
        return grad * self.rate


class Perturbs(optim.SGD):
    """Looks for a sharper loss along the gradient, by the norm of all, and steps by the gradient there."""

    @torch.no_grad()
    def step(self, closure):
        loss = torch.enable_grad()(closure)()
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        moved = [p.grad * (0.05 / norm) for p in held]
        torch._foreach_add_(held, moved)
        torch.enable_grad()(closure)()
        torch._foreach_sub_(held, moved)
        super().step()
        return loss


class Twice(Own):
    def step(self, closure=None):
        torch.enable_grad()(closure)()
        return super().step(closure)


class Ahead(Own):
    def __init__(self, params, lr=0.01):
        super().__init__(params, lr)
        self.inner = optim.SGD(self.param_groups, lr=lr)

    def step(self, closure=None):
        return self.inner.step(closure)


class Sharper(Ahead):
    def step(self, closure=None):
        closure()
        return super().step(closure)


class Wraps(optim.SGD):
    """Has what torch's optimizers have, without their `__init__`."""

    def __init__(self, inner):
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, {}

    def step(self, closure=None):
        return self.inner.step(closure)


class Sharpest(optim.Optimizer):
    """Wraps another optimizer, and computes the loss before and after a move of the weights."""

    def __init__(self, params, **options):
        super().__init__(params, options)
        self.inner = optim.SGD(self.param_groups, **options)
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        closure()
        return self.inner.step(closure)


class Keeps(Own):
    """A norm of each parameter, of one element, which is used from the 20th step on: as AdaNorm and SWATS do."""

    def direction(self, p, grad, state):
        state.setdefault("norm", torch.zeros(1)).lerp_(grad.norm(), 0.1)
        return grad / state["norm"] if self.param_groups[0]["steps"] > 20 else grad


class Counts(Own):
    """In a state that is as large as the bias of one output, and larger than its shard on the second rank."""

    def direction(self, p, grad, state):
        return grad / float(state.setdefault("count", torch.zeros(1)).add_(1))


class Masks(Own):
    """Makes states when it is built, and some that belong to no parameter: as SPAM does."""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self.state["count"] = 0
        for p in self.param_groups[0]["params"]:
            self.state[p]["mask"] = torch.arange(p.numel()).view_as(p) % 3 > 0

    def direction(self, p, grad, state):
        return torch.zeros_like(p).masked_scatter_(state["mask"], grad[state["mask"]]) if "mask" in state else grad


class Small(MLP):
    def configure_optimizers(self):
        return globals()[self.optimizer](self.parameters(), lr=0.05)


class Chosen(UntiedGPT):
    def configure_optimizers(self):
        if self.optimizer == "Wraps":
            return Wraps(optim.SGD(self.parameters(), lr=0.05))
        return globals()[self.optimizer](self.parameters(), lr=0.01)


ALONE = ["Lion", "Lamb", "LambInNumbers", "Rows", "Central", "Cautious", "Orthogonal"]
"""Those that step each parameter by itself."""
TOGETHER = ["Langevin", "Clipped", "Adapts", "Perturbs"]


def _some(kinds, layouts):
    """All of them, of which every second kind is in the short run with one layout."""
    return [
        pytest.param(kind, layout, marks=() if at % 2 == 0 and (at + place) % len(layouts) == 1 else pytest.mark.long)
        for at, kind in enumerate(kinds)
        for place, layout in enumerate(layouts)
    ]


@pytest.mark.parametrize(
    ("kind", "layout"), in_turn(_some(ALONE, LAYOUTS) + _some(TOGETHER, ["tensor", "zero1", "zero3"]), 2)
)
def test_steps_are_those_of_one_device(kind, layout):
    assert_parity(f"{__name__}:Chosen", *LAYOUTS[layout], attributes={"optimizer": kind})


@pytest.mark.parametrize("kind", ["Counts", "Masks"])
def test_states_of_one_element_and_those_of_init(kind):
    assert_parity(f"{__name__}:Small", *LAYOUTS["zero3"], attributes={"optimizer": kind})


def _fit(kind, strategy):
    module = Chosen()
    module.optimizer = kind
    with pytest.raises(UnsupportedError) as caught:
        make_trainer(2, strategy, max_epochs=1).fit(module)
    return str(caught.value), module.trainer.fit_loop.epoch_loop.batch_progress.total.started


SparseAdam = optim.SparseAdam


class Looks(optim.SGD):
    """Lookahead with slow weights of its own."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.slow = [[each.detach().clone() for each in group["params"]] for group in self.param_groups]


class Centred(optim.SGD):
    """Takes it that each parameter has a gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure()
        for group in self.param_groups:
            for each in group["params"]:
                if each.ndim > 1:
                    each.grad.sub_(each.grad.mean(0, keepdim=True))
        super().step()
        return loss


SAID = {
    ("SparseAdam", "zero1"): "SparseAdam takes sparse gradients, and data ranks average dense ones",
    ("Looks", "zero3"): "Looks keeps tensors as large as its parameters in 'slow'",
    ("Langevin", "pipeline"): "Langevin steps a parameter differently when it steps others too",
    ("Clipped", "pipeline"): "Clipped steps a parameter differently when it steps others too",
    ("Adapts", "pipeline"): "Adapts steps a parameter differently when it steps others too",
    ("Twice", "pipeline"): "Twice evaluates the loss several times per step",
    ("Wraps", "pipeline"): "Wraps.__init__ does not call that of torch.optim.Optimizer, so that its state, of which a"
    " rank has a shard, cannot be gathered for checkpoints. Call super().__init__, or use zero_stage=0 with data ranks",
    ("Centred", "pipeline"): "Centred fails where a parameter has no gradient (AttributeError",
    ("Sharper", "pipeline"): "Sharper evaluates the loss several times per step",
    ("Sharpest", "pipeline"): "Sharpest evaluates the loss several times per step",
}


@pytest.mark.parametrize(("kind", "layout"), SAID)
def test_what_cannot_be_done_is_said_before_the_first_step(kind, layout):
    for said, steps in run(_fit, kind, LAYOUTS[layout][1], world=2):
        assert said.startswith(SAID[kind, layout])
        assert steps == 0


def test_one_that_steps_what_it_was_not_given_is_not_tried():
    with pytest.raises(ValueError, match="inner has a SGD"):
        tried(Ahead(torch.nn.Linear(2, 2).parameters()))


def test_one_that_has_names_of_parameters_is_refused():
    """PEFT's LoRA-FA steps one matrix by another: ZeRO 1 ended in an error of shapes."""
    named = Lion([{"params": [torch.nn.Parameter(torch.ones(2, 2))], "names": ["lora_A"]}])
    with pytest.raises(UnsupportedError, match=r"Lion has names of parameters in its option 'names'.* zero_stage=0"):
        reach_of(named, False)


def _warned(strategy):
    module = Chosen()
    module.optimizer = "Ahead"
    with caught_warnings() as caught:
        make_trainer(2, strategy, max_steps=1).fit(module)
    return [text for text in caught if "could not be tried" in text]


def test_one_that_cannot_be_tried_is_warned_of_once():
    first, other = run(_warned, LAYOUTS["pipeline"][1], world=2)
    assert [text.partition(" (")[0] for text in first] == ["Ahead could not be tried on small parameters"]
    assert not other


REACH = {
    **dict.fromkeys(ALONE, Reach.TENSOR),
    **dict.fromkeys(TOGETHER, Reach.ALL),
    "Lion": Reach.ELEMENT,
    "Twice": Reach.ELEMENT,
    "Langevin": Reach.TENSOR,  # what it draws for one tensor after the other is the same
    "Keeps": Reach.TENSOR,
}


@pytest.mark.parametrize("kind", REACH)
def test_a_trial_finds_the_reach_and_leaves_no_trace(kind):
    optimizer = globals()[kind](torch.nn.Linear(2, 2).parameters(), lr=0.01)
    random = torch.get_rng_state()
    kept = vars(optimizer).copy()
    assert tried(optimizer) is REACH[kind]
    assert needs_all_parameters(optimizer) is (kind in TOGETHER)
    assert vars(optimizer) == kept
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("kind", [optim.SGD, optim.Adam, optim.RAdam, optim.Adadelta, optim.Adafactor])
def test_a_trial_finds_the_known_answers(kind):
    assert tried(kind(torch.nn.Conv2d(2, 2, 3).parameters(), lr=0.01)) is KNOWN[kind]


def test_a_rate_that_a_schedule_starts_at_0_is_tried_at_its_full_value():
    optimizer = Lamb(torch.nn.Linear(2, 2).parameters())
    optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    assert tried(optimizer) is Reach.TENSOR


def _stepped(alone):
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2)
    optimizer = Lamb(layer.parameters())
    if alone:
        step_one_at_a_time(optimizer, StandIns(optimizer, None, None))
    for _ in range(3):
        optimizer.zero_grad()
        layer(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
    return [parameter.tolist() for parameter in layer.parameters()], optimizer.param_groups[0]["steps"]


def test_one_parameter_at_a_time_counts_the_steps_of_all():
    assert _stepped(alone=True) == _stepped(alone=False)


def test_an_optimizer_that_changes_nothing_is_not_known():
    with pytest.raises(ValueError, match="change nothing"):
        tried(Lamb(torch.nn.Linear(2, 2).parameters(), lr=0.0))
