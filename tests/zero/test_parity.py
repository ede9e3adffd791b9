"""Data parallelism under every ZeRO stage trains as one device does."""

import itertools
from types import MethodType

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tests.parity import assert_parity, long, make_trainer, refused_by_both, train
from tests.workers import WorkerError, run
from tests.zoo.plain import MLP, ConvNet


def _kinds():
    """GPT under every stage, the others where everything is sharded; MLP is trained on three ranks below."""
    for name, stage in itertools.product(["MLP", "Encoder", "GPT", "Llama"], range(4)):
        quick = name == "GPT" or (name != "MLP" and stage == 3)
        yield pytest.param(name, stage, marks=() if quick else pytest.mark.long)


@pytest.mark.parametrize(("name", "stage"), list(_kinds()))
def test_two_ranks(name, stage):
    assert_parity(name, 2, {"zero_stage": stage})


@pytest.mark.parametrize(
    ("name", "world", "stage"),
    [
        pytest.param(name, world, stage, marks=() if stage == 3 else pytest.mark.long)
        for name, world in (("MLP", 3), ("GPT", 4))
        for stage in range(4)
    ],
)
def test_more_ranks(name, world, stage):
    assert_parity(name, world, {"zero_stage": stage})


FLAGS = [
    {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "limit_val_batches": 2, "val_check_interval": 2},
    {"accumulate_grad_batches": 3},
    {"gradient_clip_val": 0.1},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
]


def _flags():
    """Those that go together under every stage, clipping by value where everything is sharded."""
    for flags, stage in itertools.product(FLAGS, range(4)):
        quick = flags is FLAGS[0] or (flags is FLAGS[-1] and stage == 3)
        yield pytest.param(flags, stage, marks=() if quick else pytest.mark.long, id=f"{'-'.join(flags)}-{stage}")


@pytest.mark.parametrize(("flags", "stage"), list(_flags()))
def test_trainer_flags(flags, stage):
    assert_parity("GPT", 2, {"zero_stage": stage}, trainer=flags)


@pytest.mark.parametrize("stage", [0, long(1), long(2), 3])
def test_batch_norm_over_all_ranks(stage):
    assert_parity("ConvNet", 2, {"zero_stage": stage}, trainer={"sync_batchnorm": True})


class ByName(nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = layer(input=x)
        return x


class MeanOfAll(ConvNet):
    """Its running statistics are means of all batches. It calls layers by the name of their argument."""

    def __init__(self):
        super().__init__()
        self.net = ByName(*self.net)
        for norm in (self.net[1], self.net[4]):
            norm.momentum = None


class ChannelsLast(ConvNet):
    """Its matrices of convolutions are not contiguous."""

    def __init__(self):
        super().__init__()
        self.net.to(memory_format=torch.channels_last)
        assert not self.net[3].weight.is_contiguous()


@pytest.mark.parametrize("stage", [long(1), 3])
def test_weights_in_channels_last(stage):
    assert_parity("tests.zero.test_parity:ChannelsLast", 2, {"zero_stage": stage}, trainer={"sync_batchnorm": True})
    assert run(_format_after_fit, stage, world=2) == [True, True]


def _format_after_fit(stage):
    module = ChannelsLast()
    make_trainer(2, {"zero_stage": stage}, quiet=True, max_steps=1, limit_val_batches=0).fit(module)
    return module.net[3].weight.is_contiguous(memory_format=torch.channels_last)


class Activated(nn.BatchNorm2d):
    """A batch norm with an activation, as model libraries have them."""

    def forward(self, x):
        statistics = (None, None) if self.running_mean is None else (self.running_mean, self.running_var)
        return F.batch_norm(x, *statistics, self.weight, self.bias, self.training, 0.1, self.eps).sin()


class Inherited(nn.BatchNorm2d):
    """Uses torch's own forward in another way."""

    def forward(self, x):
        return super().forward(x * 0.5) + x


class Computed(nn.BatchNorm2d):
    def forward(self, x):
        return (x - x.mean((0, 2, 3), keepdim=True)) * self.weight.view(1, -1, 1, 1)


class Own(ConvNet):
    """Its batch norms have forwards of their own."""

    kinds = (Activated, Inherited)

    def __init__(self):
        super().__init__()
        for at, kind in zip((1, 4), self.kinds, strict=True):
            self.net[at] = kind(self.net[at].num_features)


class OnTheObject(ConvNet):
    """One of its batch norms got a forward."""

    def __init__(self):
        super().__init__()
        self.net[1].forward = MethodType(lambda norm, x: type(norm).forward(norm, x).sin(), self.net[1])


class OwnStatistics(Own):
    kinds = (Computed, Inherited)


@pytest.mark.parametrize(("kind", "stage"), [("Own", 1), ("OnTheObject", 1), ("MeanOfAll", 0)])
def test_batch_norms_with_forwards_or_means_of_their_own(kind, stage):
    assert_parity(f"tests.zero.test_parity:{kind}", 2, {"zero_stage": stage}, trainer={"sync_batchnorm": True})


def test_a_batch_norm_whose_statistics_are_its_own_is_refused():
    with pytest.raises(WorkerError, match="Computed is a batch norm whose forward does not call"):
        assert_parity("tests.zero.test_parity:OwnStatistics", 2, {"zero_stage": 1}, trainer={"sync_batchnorm": True})


@pytest.mark.parametrize("stage", [long(1), 3])
def test_hybrid_shard(stage):
    assert_parity("GPT", 4, {"zero_stage": stage, "zero_shard_size": 2}, trainer={"gradient_clip_val": 0.1})


@pytest.mark.parametrize("stage", [0, 3])
def test_momentum(stage):
    assert_parity("GPT", 2, {"zero_stage": stage}, attributes={"optimizer": "sgd"})


class Slopes(MLP):
    """Differentiates by its inputs in validation. The second rank has a batch more."""

    def validation_step(self, batch, batch_idx):
        with torch.enable_grad():
            x = batch.requires_grad_()
            (slope,) = torch.autograd.grad(self.net(x).sum(), x)
        self.log("slope", slope.square().sum())

    def val_dataloader(self):
        return DataLoader([torch.ones(2, 8)] * (2 + self.trainer.global_rank), batch_size=None)


@pytest.mark.parametrize("stage", [1, long(2)])
def test_a_derivative_in_validation_waits_for_no_other_rank(stage):
    assert_parity(f"{__name__}:Slopes", 2, {"zero_stage": stage}, trainer={"limit_val_batches": 1.0})


def test_unequally_many_batches_of_validation_are_refused_where_each_gathers_weights():
    with refused_by_both(r"Data ranks have \[2\] \| \[3\] batches .*limit_val_batches"):
        run(train, f"{__name__}:Slopes", 2, {"zero_stage": 3}, {}, {"limit_val_batches": 1.0}, world=2)
    assert_parity(f"{__name__}:Slopes", 2, {"zero_stage": 3}, trainer={"limit_val_batches": 2})
