"""Clipping and norms over every axis: each element counted once."""

import math
from unittest import mock

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grad_value_
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_3d import Strategy3D
from lightning_3d.errors import ConfigurationError
from lightning_3d.optim.grad_norm import clip_like_one_device, grad_norm
from tests.parity import QUIET, assert_parity, in_turn, layouts, long, make_trainer
from tests.workers import on_ranks, run
from tests.zoo.language import GPT
from tests.zoo.plain import MLP

LAYOUTS = {
    **layouts("zero0"),
    "hybrid-tensor": (8, {"zero_stage": 3, "zero_shard_size": 2, "tensor_parallel_size": 2}),
    **layouts("tensor-pipeline", "pipeline-zero3", "tensor-zero2"),
}
SMALL = [name for name, (world, _) in LAYOUTS.items() if world <= 4]
FEW = [long(name) if name in ("pipeline-zero3", "tensor-zero2") else name for name in SMALL]
"""Short: one data axis, and the other two. All norms are computed in every layout of `SMALL`."""
NORMS = (1.0, 2.0, 3.0, math.inf)


class Watched(GPT):
    """Notes norms before clipping, and clips in its own way."""

    planted = None

    def __init__(self):
        super().__init__()
        self.norms = []

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if isinstance(self.trainer.strategy, Strategy3D):
            norms = [float(self.trainer.strategy.grad_norm(kind)) for kind in NORMS]
        else:
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            norms = [float(torch.nn.utils.get_total_norm(grads, kind)) for kind in NORMS]
        self.norms.append(norms)
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")

    def on_after_backward(self):
        if self.planted is not None and self.head.weight.grad is not None:
            self.planted(self)


class Counting(Strategy3D):
    asked = 0

    @property
    def layout(self):
        self.asked += 1
        return super().layout


def _asked(layers):
    """How often the layout is computed in the last of four clipped steps."""
    module, strategy, counts = MLP(), Counting(zero_stage=1), []
    module.net = nn.Sequential(nn.Linear(8, 24), *(nn.Linear(24, 24) for _ in range(layers)), nn.Linear(24, 1))
    noting = LambdaCallback(on_train_batch_end=lambda *_: counts.append(strategy.asked))
    flags = {"max_steps": 4, "gradient_clip_val": 0.1, "callbacks": [noting], "limit_val_batches": 0}
    Trainer(**QUIET, **flags, devices=2, strategy=strategy).fit(module)
    return counts[-1] - counts[-2]


def test_clipping_computes_nothing_for_each_parameter():
    assert run(_asked, 1, world=2) == run(_asked, 9, world=2)


def _fit(strategy, world, kind=Watched, planted=None, clip=None):
    seed_everything(7, verbose=False)
    module, functions = kind(), dict(vars(clip_grad))
    module.planted = planted
    make_trainer(world, strategy, max_epochs=1, limit_val_batches=0, gradient_clip_val=clip).fit(module)
    assert dict(vars(clip_grad)) == functions
    return module.norms, {name: tensor.clone() for name, tensor in module.state_dict().items()}


def _compare(world, strategy, *args):
    """Norms and weights at the end are those of one device."""
    ((wanted, weights),) = run(_fit, None, 1, *args, world=1)
    for norms, got in run(_fit, strategy, world, *args, world=world):
        torch.testing.assert_close(norms, wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got, weights, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", in_turn(SMALL, 2))
def test_every_norm_and_an_override_of_clipping(layout):
    _compare(*LAYOUTS[layout])


ONE = [name if name == "pipeline-zero3" else long(name) for name in LAYOUTS]
VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


@pytest.mark.parametrize("layout", ONE)
@pytest.mark.parametrize("flags", [{"gradient_clip_val": 0.1}, long(VALUE)], ids=["norm", "value"])
def test_clipping_counts_ties_and_replicas_once(layout, flags):
    assert_parity("GPT", *LAYOUTS[layout], trainer=flags | {"max_epochs": 2})


def _not_a_number(module):
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    grad = module.head.weight.grad
    (grad.to_local() if hasattr(grad, "to_local") else grad).fill_(math.nan)


@pytest.mark.parametrize("layout", FEW)
def test_not_a_number_on_one_rank_is_seen_by_all(layout):
    world, strategy = LAYOUTS[layout]
    for norms, _ in run(_fit, strategy, world, Watched, _not_a_number, world=world):
        assert all(math.isnan(norm) for norm in norms[0])


class Complex(MLP):
    optimizer = "plain_sgd"

    def __init__(self):
        super().__init__()
        self.phases = torch.nn.Parameter(torch.randn(8, dtype=torch.cfloat))
        self.norms = []

    def loss(self, batch):
        return super().loss(batch) + (batch[0].to(torch.cfloat) @ self.phases).abs().mean()

    def on_before_optimizer_step(self, optimizer):
        grads = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        ours = isinstance(self.trainer.strategy, Strategy3D)
        norm = self.trainer.strategy.grad_norm if ours else lambda kind: torch.nn.utils.get_total_norm(grads, kind)
        self.norms.append([float(norm(kind)) for kind in NORMS])


def test_complex_gradients_have_the_norm_of_their_absolute_values():
    _compare(2, {"zero_stage": 0}, Complex, None, 0.1)


@pytest.mark.parametrize("kind", [0.0, -1.0, -math.inf, math.nan])
def test_norms_that_cannot_be_put_together_are_refused(kind):
    with pytest.raises(ConfigurationError, match=r"above 0 only. Use 1.0, 2.0 or float"):
        grad_norm([], lambda _: True, kind, torch.device("cpu"))


class ClipsByTorch(Watched):
    """Calls torch's own functions on parts of the module, one of which a pipeline has on its last stage only."""

    optimizer = "plain_sgd"

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        last = [parameter for name, parameter in self.named_parameters() if name.startswith("norm")]
        assert last
        self.norms.append(float(clip_grad_norm_(last, 0.01)))
        self.norms.append(float(clip_grad_norm_(self.parameters(), 0.1, norm_type=3, error_if_nonfinite=True)))
        clip_grad_value_(self.parameters(), 0.01)

    def on_train_end(self):
        other = torch.nn.Linear(2, 2)
        other(torch.ones(2)).sum().backward()
        self.norms.append(float(clip_grad_norm_(other.parameters(), 1.0)))  # each rank's own


@pytest.mark.parametrize("layout", [*FEW, "zero1"])
def test_clipping_by_torchs_own_functions(layout):
    _compare(*(LAYOUTS | {"zero1": (2, {"zero_stage": 1})})[layout], ClipsByTorch)


class ClippedByHand(MLP):
    """Manual optimization: one part is clipped by Lightning's method, the other by torch's function."""

    optimizer = "plain_sgd"
    automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(part, lr=0.5) for part in (self.net[0].parameters(), self.net[2:].parameters())]

    def training_step(self, batch, batch_idx):
        first, second = self.optimizers()
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        self.manual_backward(loss)
        self.clip_gradients(first, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
        self.log("norm", clip_grad_norm_(self.net[2:].parameters(), 0.02))
        for each in (first, second):
            each.step()
            each.zero_grad()


class Listed(MLP):
    """Lists parameters when the step begins, where they are gathered. Their gradients are at the shards."""

    optimizer = "plain_sgd"
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        listed = list(self.parameters())
        self.net.zero_grad()
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        self.manual_backward(loss)
        for parameter in listed:
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        self.optimizers().step()


BY_HAND = {"zero1": {"zero_stage": 1}, "zero3": {"zero_stage": 3}, "tensor": {"tensor_parallel_size": 2}}


@pytest.mark.parametrize("layout", BY_HAND)
def test_clipping_in_manual_optimization(layout):
    assert_parity(f"{__name__}:ClippedByHand", 2, BY_HAND[layout])


@pytest.mark.parametrize("layout", BY_HAND)
def test_gradients_of_parameters_that_a_step_listed(layout):
    assert_parity(f"{__name__}:Listed", 2, BY_HAND[layout])


@pytest.mark.parametrize("strategy", [{"zero_stage": 3}, {"pipeline_parallel_size": 2}])
@pytest.mark.parametrize(("algorithm", "function"), [("norm", "clip_grad_norm_"), ("value", "clip_grad_value_")])
@on_ranks(2, group=False)
def test_clipping_calls_the_function_that_users_may_replace(strategy, algorithm, function):
    seed_everything(7, verbose=False)
    with mock.patch(f"torch.nn.utils.{function}", wraps=getattr(clip_grad, function)) as clips:
        make_trainer(2, strategy, gradient_clip_val=0.1, gradient_clip_algorithm=algorithm, max_steps=3).fit(MLP())
    assert clips.call_count == 3


class Launches(TorchDispatchMode):
    """Counts operations as a device would launch them."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "aten":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def _launches(count):
    """The operations of one clipping of `count` matrices."""
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2, 2)) for _ in range(count)])
    for parameter in module:
        parameter.grad = torch.ones(2, 2)
    undo = clip_like_one_device(module, lambda some, kind: grad_norm(some, lambda _: True, kind, torch.device("cpu")))
    with Launches() as launches:
        clip_grad_norm_(module.parameters(), 0.5)
    undo()
    assert module[0].grad.norm() == pytest.approx(0.5 / count**0.5)
    return launches.names


def test_clipping_launches_no_more_operations_for_more_parameters():
    (few,), (many,) = (run(_launches, count, world=1, group=True) for count in (3, 60))
    assert few == many
    assert [name for name in many if name.startswith("_foreach")] == ["_foreach_norm", "_foreach_mul_"]
