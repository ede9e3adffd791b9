"""All peers of a data rank see the same samples; where they do not, the error says who.

Lightning builds a loader anew to divide it over data ranks. One that then gives other batches is refused.
"""

import os
import random
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from lightning_3d import Strategy3D
from lightning_3d.data.same_samples import checksum, refuse_other_shares
from lightning_3d.errors import DivergenceError, UnsupportedError
from tests.parity import QUIET, caught_warnings, long, make_trainer
from tests.workers import on_ranks, run
from tests.zoo.language import Encoder
from tests.zoo.plain import MLP

GRIDS = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "data-tensor": {"tensor_parallel_size": 2, "data_parallel_size": 2},
}


class Augmented(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + random.random() + torch.rand(()), y


class Stream(IterableDataset):
    def __iter__(self):
        for _ in range(24):
            yield torch.randn(8), torch.randn(1)


class Kept(MLP):
    kind = "shuffled"

    def __init__(self):
        super().__init__()
        self.given = []

    def on_train_batch_start(self, batch, batch_idx):
        self.given.append(checksum(batch))

    def train_dataloader(self):
        if self.kind == "by_rank":
            torch.manual_seed(int(os.environ["RANK"]))
        data = Augmented(torch.randn(48, 8), torch.randn(48, 1))
        if self.kind == "stream":
            return DataLoader(Stream(), batch_size=8)
        workers = 1 if self.kind == "workers" else 0
        return DataLoader(data, batch_size=8, shuffle=self.kind != "ordered", num_workers=workers)


def _given(kind, strategy, world, seeded, rank_zero_draws=False):
    if seeded:
        seed_everything(7, workers=True, verbose=False)
    else:
        torch.manual_seed(int(os.environ["RANK"]))
        random.seed(int(os.environ["RANK"]))
        os.environ.pop("PL_SEED_WORKERS", None)
    module = Kept()
    module.kind = kind
    if rank_zero_draws and os.environ["RANK"] == "0":
        module.on_train_epoch_end = lambda: torch.rand(())
    try:
        make_trainer(world, strategy, max_epochs=2, limit_val_batches=0, use_distributed_sampler=True).fit(module)
    except DivergenceError as error:
        return str(error)
    return module.given


@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "unseeded"])
@pytest.mark.parametrize("grid", ["tensor", "pipeline"])
@pytest.mark.parametrize("kind", ["shuffled", "stream", long("workers")])
def test_peers_see_the_same_samples(kind, grid, seeded):
    first, second = run(_given, kind, GRIDS[grid], 2, seeded, world=2)
    assert len(first) > 5
    assert len(set(first)) == len(first)
    assert first == second


@pytest.mark.long
def test_data_ranks_augment_differently():
    ranks = run(_given, "workers", GRIDS["data-tensor"], 4, True, world=4)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert not set(ranks[0]) & set(ranks[2])


@pytest.mark.parametrize("grid", ["tensor", "data-tensor"])
def test_different_samples_are_refused_with_the_ranks(grid):
    world = 2 if grid == "tensor" else 4
    for rank, said in enumerate(run(_given, "by_rank", GRIDS[grid], world, True, world=world)):
        assert "batch 0 of training_step is not the same" in said
        assert ("2 | 3" if rank > 1 else "0 | 1") in said


@pytest.mark.parametrize("kind", [long("ordered"), "shuffled", "stream"])
def test_samples_are_those_of_one_device(kind):
    """Of a plain Trainer, whose sampler is the user's own."""
    (alone,) = run(_given, kind, None, 1, True, world=1)
    assert run(_given, kind, {"zero_stage": 0}, 1, True, world=1) == [alone]
    for grid in ("tensor", "pipeline"):
        assert run(_given, kind, GRIDS[grid], 2, True, world=2) == [alone, alone]


def test_an_order_that_one_rank_draws_for_itself_is_noticed_in_a_later_epoch():
    first, second = run(_given, "shuffled", GRIDS["tensor"], 2, True, True, world=2)
    assert "batch 0 of training_step is not the same" in first
    assert first == second


class Cuts(MLP):
    """Its step takes what a transfer hook makes of the loader's batch."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return {"pair": batch}

    def loss(self, batch):
        return super().loss(batch["pair"])


@pytest.mark.parametrize("grid", ["tensor", "pipeline"])
@on_ranks(2, group=False)
def test_what_runs_ahead_of_training_is_given_what_transfer_hooks_make(grid):
    with caught_warnings() as caught:
        make_trainer(2, GRIDS[grid], max_steps=1, limit_val_batches=0).fit(Cuts())
    assert [text for text in caught if "ahead of training" in text] == []


class Given(MLP):
    divided = False

    def train_dataloader(self):
        samples = [(torch.randn(8), torch.randn(1)) for _ in range(24)]
        share = self.trainer.distributed_sampler_kwargs if self.divided else {"rank": 0, "num_replicas": 1}
        sampler = DistributedSampler(samples, shuffle=False, **share)
        return DataLoader(samples, batch_size=4, sampler=sampler)


def _said_of_equal_batches(divided, strategy):
    seed_everything(1, verbose=False)
    module = Given()
    module.divided = divided
    with caught_warnings() as caught:
        make_trainer(2, strategy, max_steps=3, limit_val_batches=0, use_distributed_sampler=False).fit(module)
    return sum("first batches of all 2 data ranks are equal" in text for text in caught)


def test_a_loader_that_divides_nothing_is_noticed_once():
    assert run(_said_of_equal_batches, False, {}, world=2) == [1, 0]
    assert run(_said_of_equal_batches, True, {}, world=2) == [0, 0]
    assert run(_said_of_equal_batches, False, {"tensor_parallel_size": 2}, world=2) == [0, 0]  # one data rank


class Predicts(MLP):
    def predict_step(self, batch, index):
        return self.net(batch)


@on_ranks(2, group=False)
def test_peers_whose_evaluation_data_differ_take_the_first_ones():
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    module = Predicts()
    loader = DataLoader(torch.randn(8, 8, generator=torch.Generator().manual_seed(rank)), batch_size=4)
    trainer = make_trainer(2, {"tensor_parallel_size": 2})
    with caught_warnings() as caught:
        given = torch.cat(trainer.predict(module, loader))
    first = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(given, module.net(first).detach())
    assert sum("use the batches of the first rank" in text for text in caught) == 1


class Later(Predicts):
    """Evaluates on data that each process draws for itself from the second epoch on."""

    def __init__(self):
        super().__init__()
        self.given = []

    def validation_step(self, batch, index, dataloader_idx=0):
        self.given.append(checksum(batch))

    def val_dataloader(self):
        seed = int(os.environ["RANK"]) if self.trainer.current_epoch else 0
        return DataLoader(torch.randn(12, 8, generator=torch.Generator().manual_seed(seed)), batch_size=4)


def _evaluations():
    module = Later()
    flags = {"max_epochs": 2, "limit_train_batches": 1, "reload_dataloaders_every_n_epochs": 1}
    make_trainer(2, {"tensor_parallel_size": 2}, **flags).fit(module)
    return module.given


class Loaders(Later):
    def val_dataloader(self):
        seeds = (0, int(os.environ["RANK"]))
        sets = [torch.randn(12, 8, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return [DataLoader(each, batch_size=4) for each in sets]


def _loaders():
    module = Loaders()
    make_trainer(2, {"tensor_parallel_size": 2}).validate(module, verbose=False)
    return module.given


@pytest.mark.parametrize("evaluate", [_evaluations, _loaders])
def test_every_evaluation_and_every_loader_is_compared(evaluate):
    first, second = run(evaluate, world=2)
    assert len(first) == 6
    assert first == second


def test_a_fingerprint_of_what_is_conjugated_or_negated_lazily():
    x = torch.randn(4, dtype=torch.cfloat)
    assert checksum(x.conj()) == checksum(x.conj().resolve_conj())
    assert checksum(x.conj()) != checksum(x)
    assert checksum(x.conj().imag) == checksum(-x.imag)


def _stream_after(strategy, world):
    seed_everything(7, verbose=False)
    trainer = make_trainer(world, strategy, quiet=True, max_epochs=1, limit_val_batches=0)
    trainer.fit(Encoder())  # whose rates of dropout are 0
    return torch.rand(2).tolist()


def test_tensor_ranks_leave_the_stream_where_one_device_does():
    """The order of the next epoch is drawn from it."""
    (wanted,) = run(_stream_after, None, 1, world=1)
    assert run(_stream_after, {"tensor_parallel_size": 2}, 2, world=2) == [wanted] * 2


ROWS, SIZE = 32, 4


class Batched(DataLoader):
    """Reads a batch by one call of its dataset, as the loader of scvi-tools does, if it is given no sampler."""

    def __init__(self, data, size=SIZE, sampler=None, **kwargs):
        if sampler is None:
            sampler = BatchSampler(SequentialSampler(data), size, drop_last=False)
        elif type(sampler) is DistributedSampler:
            sampler = Shares(sampler)
        if not kwargs.get("batch_size"):
            kwargs["batch_size"] = None if isinstance(sampler, BatchSampler | Shares) else 1
        super().__init__(data, sampler=sampler, **kwargs)


class Shares(DistributedSampler):
    """Batches of the samples of one data rank."""

    def __init__(self, inner):
        self.inner = inner

    def __iter__(self):
        return iter(BatchSampler(self.inner, SIZE, drop_last=False))

    def __len__(self):
        return len(self.inner) // SIZE


class Net(MLP):
    own = False

    def train_dataloader(self):
        x = torch.linspace(-1, 1, ROWS * 8).view(ROWS, 8)
        data = TensorDataset(x, x.sum(1, keepdim=True))
        if not self.own:
            return Batched(data)
        return Batched(data, sampler=DistributedSampler(data, shuffle=False, **self.trainer.distributed_sampler_kwargs))

    def on_train_batch_start(self, batch, batch_idx):
        self.given = [*getattr(self, "given", []), batch[0]]


def given(own, sampler):
    """The batches of this data rank, or its error and the steps before it."""
    module = Net()
    module.own = own
    flags = {**QUIET, "use_distributed_sampler": sampler, "limit_val_batches": 0, "max_epochs": 1}
    try:
        Trainer(**flags, devices=2, strategy=Strategy3D(quiet=True, timeout=60)).fit(module)
    except UnsupportedError as error:
        return str(error), len(getattr(module, "given", []))
    return torch.cat(module.given)


def test_a_loader_whose_batches_get_another_shape_is_refused_and_the_remedy_works():
    for error, steps in run(given, False, True, world=2):
        assert "the Batched anew" in error
        assert "itself takes what its dataset gives for a batch, and the new one collates 1 samples" in error
        assert steps == 0
    shares = run(given, True, True, world=2)
    full = torch.linspace(-1, 1, ROWS * 8).view(ROWS, 8)
    assert all(torch.equal(share, full[rank::2]) for rank, share in enumerate(shares))


class Streamed(list):
    """Divides itself by WORLD_SIZE, as litData's dataset does, or has datasets inside, as its `CombinedStreamingDataset`."""

    def __init__(self, *inside, ranks=2):
        super().__init__([0.0] * ROWS)
        self._datasets, self.distributed_env = inside, SimpleNamespace(world_size=ranks, global_rank=1)


@pytest.mark.parametrize(
    "around", [lambda data: data, lambda data: Streamed(Streamed(), data), lambda data: Subset(data, [0, 1])]
)
def test_data_that_divide_themselves_for_other_ranks_are_found_inside_of_others(around):
    with pytest.raises(UnsupportedError, match="Streamed has the samples of rank 1 of 4, and this is data rank 1 of 2"):
        refuse_other_shares(DataLoader(around(Streamed(ranks=4))), 2, 1)
    refuse_other_shares(DataLoader(around(Streamed())), 2, 1)
