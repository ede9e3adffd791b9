"""The default `loss_scope="auto"`: the full batch for a loss that is no mean over samples, and a line about it.

A loss that a metric computes has its gradient.
"""

from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.nn import functional as F
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection
from torchmetrics.regression import CosineSimilarity

from lightning_3d import Strategy3D
from lightning_3d.errors import ConfigurationError
from lightning_3d.layout import Layout
from lightning_3d.parallel import parallel_plan
from lightning_3d.pipeline import pipeline, training_step
from lightning_3d.pipeline.observe_batch import choose_scope
from tests.parity import caught_warnings, check, fit, long
from tests.pipeline.test_means import Masked, fresh
from tests.workers import WorkerError, run
from tests.zoo import oddities as unseen

FOUR = {"pipeline_parallel_size": 2, "num_microbatches": 4}


class Pairs(unseen.Deep):
    def loss(self, batch):
        output = F.normalize(self(batch["x"]), dim=-1)
        return F.cross_entropy(output @ output.T.detach() / 0.1, torch.arange(len(output)))


class Warmed(unseen.Deep):
    """A mean of samples counts from the second step on."""

    def loss(self, batch):
        output = self(batch["x"])
        return F.cross_entropy(output, batch["y"]) + self.global_step * output.mean(0).square().sum()


class Tempered(nn.Linear):
    """Gives rows, and a number that is the same for every microbatch."""

    def forward(self, x):
        return super().forward(x).tanh(), self.bias.sum().exp()


class Scaled(unseen.Awkward):
    """Pairs of samples, times a number from the blocks of all stages."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Tempered(6, 6) for _ in range(4))

    def loss(self, batch):
        x, scale = batch["x"], 0.0
        for block in self.blocks:
            rows, number = block(x)
            x, scale = x + rows, scale + number
        return F.cross_entropy(x @ x.T * scale * 0.1, torch.arange(len(x)))


class Noised(unseen.Deep):
    """A noise that is added to the input and is the target as well, as in a diffusion model."""

    generator = staticmethod(lambda: None)

    def loss(self, batch):
        noise = torch.randn(len(batch["x"]), 3, generator=self.generator())
        return F.mse_loss(self(batch["x"] + F.pad(noise, (0, batch["x"].shape[1] - 3))), noise)


class Seeded(Noised):
    """The noise of a generator that each step seeds anew."""

    generator = staticmethod(lambda: torch.Generator().manual_seed(1))


class Mixed(unseen.Deep):
    """Mixup: pairs of samples, drawn anew in each step."""

    def loss(self, batch):
        other = torch.randperm(len(batch["x"]))
        output = self(0.7 * batch["x"] + 0.3 * batch["x"][other])
        return 0.7 * F.cross_entropy(output, batch["y"]) + 0.3 * F.cross_entropy(output, batch["y"][other])


class Hides(unseen.Deep):
    """Hides a random part of each sample, as a masked autoencoder does: a mean over samples."""

    def loss(self, batch):
        return super().loss({**batch, "x": batch["x"] * (torch.rand_like(batch["x"]) > 0.3)})


class Relaxed(unseen.Deep):
    """Draws as a discrete autoencoder does, by a function other than torch.rand and its like."""

    def loss(self, batch):
        return super().loss({**batch, "x": batch["x"] * nn.functional.gumbel_softmax(batch["x"])})


class Sampled(unseen.Deep):
    """Draws in a block, by a sampler that has no public name."""

    def __init__(self):
        super().__init__()
        block = next(each for each in self.modules() if isinstance(each, nn.Linear))
        block.register_forward_hook(lambda _, args, result: result * torch.distributions.Gamma(4.0, 4.0).sample())


class Tossed(unseen.Deep):
    """A coin of numpy decides for the samples and for the loss."""

    def loss(self, batch):
        factor = 1 + (np.random.rand() < 0.3)
        return factor * super().loss({**batch, "x": batch["x"] * factor})


class Shaken(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 0.1 * torch.randn(len(x), 8)


class First(unseen.Deep):
    """The first block is of `kind`. An object in the batch that cannot be cut makes it one microbatch."""

    def __init__(self, kind, **others):
        super().__init__()
        self.model.trunk.body.blocks[0], self.others = kind(8, 8), others

    def batches(self, steps):
        return [{**batch, **self.others} for batch in super().batches(steps)]


class DroppedInput(Pairs):
    """Dropout before the blocks, which the head does not use."""

    def forward(self, x):
        return super().forward(F.dropout(x, 0.2))


class Normalized(unseen.Deep):
    """A mean over samples, but for a batch norm inside of a block."""

    def __init__(self):
        super().__init__()
        self.model.trunk.body.blocks[1] = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))


class NormalizedLater(Normalized):
    """Its batch norm has no effect on the first loss, as in a residual block whose last norm begins at 0."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.model.trunk.body.blocks[1][1].weight)


def scope_of(build, options=None):
    """The scope of the pipeline, and what was said."""
    scopes, plain = [], pipeline.Pipeline.__init__

    def noted(self, *args, **kwargs):
        plain(self, *args, **kwargs)
        scopes.append(self.loss_scope)

    with patch.object(pipeline.Pipeline, "__init__", noted), caught_warnings() as caught:
        fit(build, {**FOUR, **(options or {})})
    return set(scopes), [text for text in caught if "cuts batches into micro" in text]


@pytest.mark.parametrize("kind", [Masked, Pairs, Scaled])
@pytest.mark.parametrize("schedule", ["1f1b", long("gpipe")])
def test_a_loss_that_is_no_mean_trains_like_one_device_by_default(kind, schedule):
    check(partial(fresh, kind, 5), 2, {"num_microbatches": 4, "schedule": schedule}, validate=True)


@pytest.mark.parametrize(
    ("kind", "scope", "warned"),
    [(unseen.Deep, "microbatch", 0), (Noised, "microbatch", 0), (Mixed, "microbatch", 0), (Pairs, "batch", 0),
     (DroppedInput, "batch", 0), (Masked, "batch", 0), (Normalized, "microbatch", 1), (Warmed, "batch", 0), (NormalizedLater, "microbatch", 1)],
)  # fmt: skip
def test_the_scope_follows_from_the_loss(kind, scope, warned):
    (scopes, said), (others, _) = run(scope_of, partial(fresh, kind), world=2)
    assert scopes == others == {scope}
    assert [text.count("batch norm inside of blocks") for text in said] == [1] * warned


@pytest.mark.parametrize("kind", [long(Noised), Mixed, Tossed, Seeded])
def test_a_loss_on_the_full_batch_gets_no_other_noise_than_its_inputs(kind):
    with pytest.raises(WorkerError, match="UnsupportedError: training_step draws random numbers before or between"):
        run(fit, partial(fresh, kind), {**FOUR, "loss_scope": "batch"}, world=2)


def _heads(kind):
    titles, plain = [], training_step.play
    with patch.object(training_step, "play", lambda *args: titles.append(args[3]) or plain(*args)):
        fit(partial(fresh, kind), FOUR)
    return titles.count("head")


def test_the_head_runs_again_only_where_a_step_draws_before_it():
    assert [run(_heads, kind, world=2) for kind in (Pairs, DroppedInput)] == [[0, 1], [0, 7]]


def test_the_line_gives_the_reason_the_price_and_the_way_out():
    layout = Layout(pipeline_parallel_size=2)
    line = choose_scope("auto", None, layout).line
    assert "could not be looked at" in line
    assert "in place of 1f1b" in line
    assert "loss_scope='microbatch'" in line
    assert choose_scope("microbatch", None, layout).line == ""
    whole = choose_scope("auto", None, Layout(pipeline_parallel_size=2, num_microbatches=1))
    assert whole.value == "microbatch"
    assert "has another seed than on one device" in whole.line


def _line(kind, options):
    scopes, plain = [], parallel_plan.choose_scope
    with patch.object(parallel_plan, "choose_scope", lambda *args: scopes.append(plain(*args)) or scopes[-1]):
        fit(partial(fresh, kind), {**FOUR, **options})
    return [scope.line for scope in scopes if scope.value == "microbatch"]


def test_a_line_says_that_each_microbatch_draws_its_own_numbers():
    kinds = {Hides: 4, Tossed: 4, partial(Tossed): 1, partial(First, Shaken, note=Shaken): 4, unseen.Deep: 4}
    for kind, parts in [*kinds.items(), (Relaxed, 1), (Sampled, 1)]:
        for (line,) in run(_line, kind, {"num_microbatches": parts}, world=2):
            assert ("draws random numbers other than dropout" in line) == (kind is not unseen.Deep)
    said = [said for _, said in run(scope_of, partial(fresh, Hides), {"loss_scope": "batch"}, world=2)]
    assert [["draws random numbers other than dropout" in text for text in texts] for texts in said] == [[True], []]


def test_another_word_is_refused():
    with pytest.raises(ConfigurationError, match="'sample' is not one of 'auto', 'microbatch', 'batch'"):
        Strategy3D(loss_scope="sample")


@pytest.mark.parametrize("argument", [{"tensor_plan": "whole"}, {"pipeline_split": "net.2"}])
def test_a_plan_of_another_type_is_refused(argument):
    """A string ended in an AttributeError of ours on each rank, or was read as a name for each letter."""
    with pytest.raises(ConfigurationError, match=r"the first one is a dict .*, and the second one a list"):
        Strategy3D(**argument)


class Scaling(nn.Linear):
    """A value of all samples inside of a block, that changes little."""

    def forward(self, x):
        return super().forward(x) * (1 + 1e-3 * x.detach().abs().max())


class ScalingNoise(Scaling):
    """The same behind noise of length 1. Draws of 0 made it not a number, which hid that value."""

    def forward(self, x):
        noise = torch.randn_like(x)
        return super().forward(x + 1e-30 * noise / noise.norm())


@pytest.mark.parametrize("kind", [Scaling, ScalingNoise])
def test_a_small_value_of_all_samples_in_a_block_is_refused(kind):
    with pytest.raises(WorkerError, match="depends on the other samples of the batch"):
        run(fit, partial(fresh, partial(First, kind)), {"pipeline_parallel_size": 2, **FOUR}, world=2)


class Net(LightningModule):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.blocks = kind, nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])
        self.head = nn.Linear(6, 3)
        self.criterion, self.mse = MeanSquaredError(), MeanSquaredError()
        self.similarity = CosineSimilarity(reduction="mean")
        self.both = MetricCollection({"a": MeanSquaredError(), "b": MeanAbsoluteError()})

    def training_step(self, batch, index):
        self.log("loss", loss := LOSSES[self.kind](self, self.head(self.blocks(batch["x"])), batch["y"]))
        return {"loss": loss}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def logged(net, prediction, target):
    """A metric whose value is only logged, as most are."""
    net.log("mse", net.mse(prediction, target))
    return F.mse_loss(prediction, target)


LOSSES = {
    "Alone": lambda net, *pair: net.criterion(*pair),
    "Term": lambda net, *pair: F.l1_loss(*pair) + 0.3 * (1 - net.similarity(*pair)),
    "Collected": lambda net, *pair: torch.stack([*net.both(*pair).values()]) @ torch.tensor([1, 0.5]),
    "Logged": logged,
}


def build(kind):
    torch.manual_seed(1)
    data = torch.Generator().manual_seed(2)
    return Net(kind), [
        {"x": torch.randn(8, 6, generator=data), "y": torch.randn(8, 3, generator=data)} for _ in range(5)
    ]


@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_of_metrics_trains_as_on_one_device(kind):
    check(partial(build, kind), 2, {"num_microbatches": 4})
