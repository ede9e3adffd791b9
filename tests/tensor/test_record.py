"""The run ahead of planning leaves a module as it was, and refuses nothing that training could keep."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_3d.errors import WritesError
from lightning_3d.tensor.block_calls import record_calls
from lightning_3d.tensor.plan_module import plan_tensor
from tests.parity import caught_warnings, check, fit, make_trainer, refused_by_both
from tests.workers import run
from tests.zoo.carried import Chain
from tests.zoo.plain import MLP


class Rotary(nn.Module):
    """Fills a table when it is first called, as wide as it needs it then."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("table", torch.empty(0), persistent=False)
        self.register_buffer("later", None)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        if len(self.table) < x.shape[1]:
            self.table = torch.arange(x.shape[1], dtype=x.dtype).cos()
            self.later = torch.ones(3)
        return x + self.down(self.up(x * self.table[: x.shape[1], None]).tanh())


def test_buffers_that_are_filled_when_they_are_needed_are_as_before():
    module, x = nn.ModuleDict({"blocks": nn.ModuleList([Rotary(), Rotary()])}), torch.randn(2, 8, 16)

    def run():
        return module["blocks"][1](module["blocks"][0](x))

    tables = [block.table for block in module["blocks"]]
    calls = record_calls(module, run)
    for block, table in zip(module["blocks"], tables, strict=True):
        assert block.table is table
        assert block.later is None
        assert not block.calls
    assert set(plan_tensor(module, 2, calls=calls).units) == {"blocks.0", "blocks.1"}


class Taught(nn.Module):
    def __init__(self, registered, convert=True):
        super().__init__()
        self.convert = convert
        self.block, self.teacher = nn.Linear(4, 4), [nn.Linear(4, 4)]
        if registered:
            self.held = self.teacher[0]

    def forward(self, x):
        dtype = torch.float64 if self.convert else x.dtype
        return self.block(x) - self.teacher[0].to(dtype)(x.to(dtype))


@pytest.mark.parametrize("own", [False, True])
def test_moving_a_module_that_is_no_part_or_has_the_dtype_is_no_write(own):
    """`module.to` assigns each parameter to its own `.data`, as the router of Switch Transformers does in forward."""
    module = Taught(own, convert=not own)
    record_calls(module, lambda: module(torch.randn(2, 4)))


def test_assigning_to_a_weight_of_its_own_is_one():
    module = Taught(True)
    with pytest.raises(WritesError, match=r"The step changes 'held.weight' in place.* dtype and shape.* before fit"):
        record_calls(module, lambda: module(torch.randn(2, 4)))


class Scales(Chain):
    """Divides its loss by a mean that moves, in a generator or in an attribute of the module."""

    def __init__(self, hidden):
        super().__init__()
        self.hidden, self.mean, self.means = hidden, 1.0, self.moving()
        next(self.means)

    @staticmethod
    def moving():
        mean = 1.0
        while True:
            mean = 0.5 * mean + 0.5 * (yield mean)

    def loss(self, batch):
        loss = F.cross_entropy(self(batch["x"]), batch["y"])
        self.mean = self.means.send(float(loss)) if self.hidden else 0.5 * self.mean + 0.5 * float(loss)
        return loss / self.mean


def of(kind, *options):
    torch.manual_seed(1)
    module = kind(*options)
    return module, module.batches(3)


def test_a_state_that_no_trial_can_put_back_is_refused():
    """Training began with what the runs ahead of it had left, without a word. The remedy is an attribute."""
    with refused_by_both(r"training_step has the loss .* Keep the state as a number or"):
        run(fit, partial(of, Scales, True), {"tensor_parallel_size": 2}, world=2)
    check(partial(of, Scales, False), 2, {"tensor_parallel_size": 2, "pipeline_parallel_size": 1})


class Adapts(Chain):
    """Differentiates in its step, and computes with copies of its blocks that have other weights."""

    def loss(self, batch):
        def loss(weights):
            x = batch["x"]
            for at in range(len(self.blocks)):
                linear = f"blocks.{at}.0" if at < len(self.blocks) - 1 else f"blocks.{at}"
                x = F.linear(x, weights[f"{linear}.weight"], weights[f"{linear}.bias"])
            return F.cross_entropy(x, batch["y"])

        weights = dict(self.named_parameters())
        grads = torch.autograd.grad(loss(weights), list(weights.values()), create_graph=True)
        return loss({name: item - 0.1 * grad for (name, item), grad in zip(weights.items(), grads, strict=True)})


def test_blocks_that_no_call_reaches_stay_unsplit():
    """The run ahead of training failed without gradients, and inputs were made up for blocks that copies stand for."""
    check(partial(of, Adapts), 2, {"tensor_parallel_size": 2, "pipeline_parallel_size": 1})


class DropsCompiled(Chain):
    """Drops in compiled code, which draws other numbers than the code that is recorded, as Inductor's does."""

    def __init__(self):
        super().__init__()
        drops = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))
        self.blocks[1] = torch.compile(drops, backend=lambda graph, _: lambda *x: (torch.rand(1), graph(*x))[1])


def test_a_compiled_block_that_draws_is_not_taken_for_a_state():
    run(fit, partial(of, DropsCompiled), {"tensor_parallel_size": 2}, world=2)


class CountsOutside(Chain):
    """Halves its loss by counts of calls that functions keep, in a closure, a default argument and an attribute."""

    def __init__(self):
        super().__init__()
        count = 0

        def weight(calls=[]):  # noqa: B006
            nonlocal count
            count, weight.total = count + 1, weight.total + 1
            calls.append(count)
            return 1.0 if max(count, weight.total, len(calls)) <= 3 else 0.5

        weight.total, self.weight = 0, weight

    def loss(self, batch):
        return F.cross_entropy(self(batch["x"]), batch["y"]) * self.weight()


def test_what_functions_keep_is_put_back():
    """Three runs ahead of training had counted, and all of them had the loss of one device."""
    check(partial(of, CountsOutside), 2, {"tensor_parallel_size": 2, "pipeline_parallel_size": 1})


class Predicts(MLP):
    """Returns what is no result of a training step."""

    predict_dataloader = MLP.val_dataloader

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0]), batch[1]


def predicted(world, strategy):
    with caught_warnings() as texts:
        torch.manual_seed(1)
        found = make_trainer(world, strategy).predict(Predicts())
    return [each for each, _ in found], texts


def test_a_prediction_of_any_kind_is_run_ahead():
    ((wanted, _),) = run(predicted, 1, None, world=1)
    for found, said in run(predicted, 2, {"tensor_parallel_size": 2}, world=2):
        torch.testing.assert_close(found, wanted)
        assert not any("could not run" in each for each in said)
