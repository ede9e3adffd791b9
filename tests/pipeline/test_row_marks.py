"""Blocks whose output for a sample depends on other samples are refused, since a microbatch has fewer of them."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_3d.pipeline.row_marks import first_that_mixes, row_marks
from tests.parity import assert_parity, check, fit, train
from tests.workers import WorkerError, run
from tests.zoo import oddities
from tests.zoo.plain import MLP


def centered(x):
    return x - x.mean(0)


def dropping(x):
    """Every row has a number, and rows behind the sixth are dropped."""
    return x * (torch.arange(len(x)) < 6).view(-1, *(1,) * (x.dim() - 1))


def normalized(x):
    """The sum of each row is zero, with and without the mean of the batch."""
    return F.layer_norm(x, x.shape[1:])


def masked(x):
    return torch.cat([x, torch.full_like(x[:, :1], -1e9)], dim=1)


def transposed(x):
    return x.transpose(0, 1)


@pytest.mark.parametrize("after", [lambda x: x, normalized, masked, transposed])
def test_a_call_that_uses_other_rows_is_found(after):
    torch.manual_seed(0)
    x = torch.randn(8, 5, 6)
    calls = lambda x: [row_marks(after(x)), row_marks(after(centered(x)))]  # noqa: E731
    assert first_that_mixes(calls(x), calls(x[:2]), 1e-3) == 1
    alone = lambda x: [row_marks(after(x)), row_marks((after(x), torch.ones(3)))]  # noqa: E731
    assert first_that_mixes(alone(x), alone(x[:2]), 1e-3) is None


@pytest.mark.parametrize("shape", [(4, 600, 700), (64, 256, 256), (3000, 500), (8, 3, 300, 300), (700, 4, 600)])
@pytest.mark.parametrize("rows", [1, 3])
def test_large_tensors_are_compared_by_some_elements(shape, rows):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert first_that_mixes([row_marks(centered(x))], [row_marks(centered(x[:rows]))], 1e-3) == 0
    assert first_that_mixes([row_marks(x)], [row_marks(x[:rows])], 1e-3) is None
    second = lambda x: row_marks(x.transpose(0, 1))  # noqa: E731
    assert first_that_mixes([second(x)], [second(x[:rows])], 1e-3) is None


@pytest.mark.parametrize("shape", [(), (0,), (4, 0), (0, 3), (4,)])
def test_a_tensor_of_any_shape_has_marks(shape):
    x = torch.randn(shape)
    assert [length for length, _ in row_marks(x)[0]] == list(shape)
    assert first_that_mixes([row_marks(x)], [row_marks(x)], 1e-3) is None


class Together(nn.Module):
    def __init__(self, code):
        super().__init__()
        self.layer, self.code = oddities.dense(), code

    def forward(self, x):
        return x + self.layer(self.code(x))


class Mixing(oddities.Awkward):
    def __init__(self, code):
        super().__init__()
        self.embed, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.Sequential(*(Together(code) for _ in range(3)))

    def forward(self, x):
        return self.head(self.blocks(self.embed(x)))


def made(code):
    module = Mixing(code)
    return module, module.batches(3)


@pytest.mark.parametrize("code", [centered, dropping])
@pytest.mark.parametrize("scope", ["auto", "batch"])
def test_such_a_block_is_refused(scope, code):
    strategy = {"pipeline_parallel_size": 2, "num_microbatches": 4, "loss_scope": scope}
    with pytest.raises(
        WorkerError, match=r"UnsupportedError: The output of 'blocks.0' for a sample depends on the other"
    ):
        run(fit, partial(made, code), strategy, world=2)


def test_the_remedy_works():
    check(partial(made, dropping), 2, {"num_microbatches": 1})


class Joined(MLP):
    """Two views of a batch in one call, each a negative of the other samples."""

    def loss(self, batch):
        first, second = self.net(torch.cat([batch[0], batch[0].roll(1, 1)])).chunk(2)
        return F.cross_entropy(first @ second.T, torch.arange(len(first)))


class Stacked(MLP):
    def loss(self, batch):
        rows = self.net(torch.stack([batch[0], batch[0].roll(1, 1)], 1).flatten(0, 1))
        first, second = rows.unflatten(0, (-1, 2)).unbind(1)
        return F.cross_entropy(first @ second.T, torch.arange(len(first)))


def test_joined_views_are_refused_with_a_remedy():
    name, strategy = "tests.pipeline.test_row_marks:", {"pipeline_parallel_size": 2, "num_microbatches": 2}
    with pytest.raises(WorkerError, match=r"rows are in another order \(torch.cat .* torch.stack\("):
        run(train, name + "Joined", 2, strategy, {}, {}, world=2)
    assert_parity(name + "Stacked", 2, strategy)


@pytest.mark.parametrize("shape", [(8, 5, 6), (600, 300, 300)])
def test_a_call_that_drops_the_last_rows_is_found_in_the_last_part(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    full, first, last = ([row_marks(dropping(part))] for part in (x, x[:4], x[-4:]))
    assert first_that_mixes(full, first, 1e-3) is None
    assert first_that_mixes(full, last, 1e-3, last=True) == 0
    assert first_that_mixes([row_marks(x)], [row_marks(x[-4:])], 1e-3, last=True) is None


class Weighed(MLP):
    """Joined views whose loss is a mean over samples, but for what the first batch cannot show."""

    def loss(self, batch):
        x = batch[0]
        both = self.net(torch.cat([x, x * 0])) - torch.cat([batch[1], batch[1]])
        return self.mean(both, batch)

    def mean(self, both, batch):
        self.log("part", both.square().sum() / batch[1].square().sum())  # as a metric weighs the numbers of its batch
        return both.square().mean()


class FirstIsZero(Weighed):
    def mean(self, both, batch):
        return (both.square() * (self.global_step > 0)).mean()


@pytest.mark.parametrize("views", ["Weighed", "FirstIsZero"])
def test_joined_views_are_refused_where_the_loss_is_computed_on_the_full_batch(views):
    name, strategy = f"tests.pipeline.test_row_marks:{views}", {"pipeline_parallel_size": 2}
    with pytest.raises(WorkerError, match="rows are in another order"):
        run(train, name, 2, {**strategy, "num_microbatches": 2}, {}, {}, world=2)
    assert_parity(name, 2, {**strategy, "num_microbatches": 1})
