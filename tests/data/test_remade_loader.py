"""Lightning builds a loader anew to divide it over data ranks. One that then gives other batches is refused."""

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler, Subset, TensorDataset

from lightning_3d import Strategy3D
from lightning_3d.data.same_samples import refuse_other_shares
from lightning_3d.errors import UnsupportedError
from tests.parity import QUIET
from tests.workers import run
from tests.zoo.vectors import MLP

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
