"""A batch size is divided by the data ranks; one that is divided by all ranks gets a warning."""

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, TensorDataset

from tests.parity import caught_warnings, make_trainer
from tests.workers import WorkerError, run
from tests.zoo.plain import MLP


class Data(LightningDataModule):
    """As lightning-hydra-template has it, or with the number that is meant."""

    def __init__(self, meant):
        super().__init__()
        self.meant = meant

    def setup(self, stage):
        trainer = self.trainer
        self.each = 8 // (trainer.strategy.data_parallel_size if self.meant else trainer.world_size)

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(16, 8), torch.ones(16, 1)), self.each)


class Dividing(MLP):
    """Each rank takes a part of the batch, as data ranks with equal batches may. All samples are equal."""

    def training_step(self, batch, batch_idx):
        return super().training_step([part[:: self.trainer.world_size] for part in batch], batch_idx)


def fit(meant, strategy, kind=MLP):
    trainer = make_trainer(2, strategy, max_steps=1)
    data = Data(meant)
    with caught_warnings() as caught:
        trainer.fit(kind(), datamodule=data)
    said = [text for text in caught if "reads trainer." in text]
    return trainer.global_rank, said, trainer.strategy.data_parallel_size, trainer.strategy.data_parallel_rank


@pytest.mark.parametrize(("strategy", "data"), [({"tensor_parallel_size": 2}, 1), ({}, 2)])
def test_the_numbers_are_those_of_the_data_ranks(strategy, data):
    for rank, said, size, place in run(fit, True, strategy, world=2):
        assert (said, size, place) == ([], data, rank % data)


def test_a_batch_size_divided_by_all_ranks_gets_one_warning():
    (_, said, _, _), (_, quiet, _, _) = run(fit, False, {"tensor_parallel_size": 2}, world=2)
    (text,) = said
    assert text.startswith("Data.setup reads trainer.world_size, but")
    assert "trainer.strategy.data_parallel_size" in text
    assert quiet == []


class Scaling(MLP):
    """The learning rate grows with the devices, as parseq has it. Lightning's own counts are no reading."""

    def configure_optimizers(self):
        steps = self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), 0.01 * self.trainer.num_devices ** (steps > 0))


class Counting(MLP):
    """Gathers as many parts as there are ranks, as solo-learn's DeepClusterV2 does: data ranks send fewer."""

    def on_train_start(self):
        self.parts = [None] * self.trainer.world_size


ASKS = {
    Dividing: "training_step reads trainer.world_size",
    Scaling: "configure_optimizers reads trainer.num_devices",
    Counting: "on_train_start reads trainer.world_size",
}


@pytest.mark.parametrize("kind", ASKS)
def test_a_module_that_divides_or_scales_by_all_ranks_gets_one_warning(kind):
    (_, (text,), _, _), _ = run(fit, True, {"tensor_parallel_size": 2}, kind, world=2)
    assert text.startswith(f"{kind.__name__}.{ASKS[kind]}, but")


class Contrasting(MLP):
    """Puts its own features, which have a gradient, in the place of gathered ones, as many CLIP trainers do."""

    def training_step(self, batch, batch_idx):
        features = [*self.all_gather(self.net(batch[0])).view(-1, len(batch[0]), 1)]
        features[self.global_rank] = self.net(batch[0])
        return torch.cat(features).square().mean()


def test_an_index_error_of_a_step_that_reads_the_global_rank_names_what_to_read():
    cause = "Contrasting.training_step reads trainer.global_rank, but .* Use trainer.strategy.data_parallel_rank"
    with pytest.raises(WorkerError, match=f"IndexError: .*range. This may be the cause: {cause}"):
        run(fit, True, {"tensor_parallel_size": 2}, Contrasting, world=2)


def test_all_ranks_may_be_meant_where_they_are_the_data_ranks():
    assert all(said == [] for _, said, _, _ in run(fit, False, {}, world=2))


class Sharing(MLP):
    """Each rank takes samples of its own."""

    def training_step(self, batch, batch_idx):
        mine = slice(self.global_rank, None, self.trainer.world_size)
        return super().training_step([torch.rand_like(part)[mine] for part in batch], batch_idx)


@pytest.mark.parametrize("sizes", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_an_error_about_peers_with_other_samples_names_the_code_that_shares_them(sizes):
    with pytest.raises(WorkerError, match=r"(Divergence|PipelineSplit)Error: .*Sharing.training_step reads trainer.w"):
        run(fit, True, {sizes: 2}, Sharing, world=2)
