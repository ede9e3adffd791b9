"""The base of the modules that bring their own batches. None of them knows about this package."""

import math

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader, Dataset


class Batches(Dataset):
    """A fixed list of batches: the samples of every data rank, cut the same way at any number of ranks.

    Global batch b holds samples [b * size, (b + 1) * size); data rank r of n takes its r-th part.
    """

    def __init__(self, tensors, size, rank=0, ranks=1):
        self.tensors, self.size, self.rank, self.ranks = tensors, size, rank, ranks

    def __len__(self):
        return math.ceil(len(self.tensors[0]) / self.size)

    def __getitem__(self, index):
        whole = [tensor[index * self.size : (index + 1) * self.size] for tensor in self.tensors]
        return tuple(tensor.tensor_split(self.ranks)[self.rank] for tensor in whole)


class Base(LightningModule):
    """Logs the loss; the optimizer and the batches are set by the test."""

    batch_size = 12
    samples = 60
    optimizer = "adamw"
    shuffled = False
    """Samples in another order: a control for tests that allow rounding errors."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def tensors(self):
        raise NotImplementedError

    def loss(self, batch):
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def step_by_hand(self, optimizer, batch):
        """A step of manual optimization; its loss."""
        loss = self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(float(self.trainer.callback_metrics["loss"]))

    def _loader(self):
        wanted = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        order = torch.arange(self.samples - 1, -1, -1) if self.shuffled else slice(None)
        tensors = [tensor[order] for tensor in self.tensors()]
        batches = Batches(tensors, self.batch_size, wanted["rank"], wanted["num_replicas"])
        return DataLoader(batches, batch_size=None, shuffle=False)

    def train_dataloader(self):
        return self._loader()

    def val_dataloader(self):
        return self._loader()

    def configure_optimizers(self):
        if self.optimizer == "sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        if self.optimizer == "plain_sgd":
            return torch.optim.SGD(self.parameters(), lr=0.05)
        # a small epsilon would turn rounding errors of tiny gradients into steps of full size
        return torch.optim.AdamW(self.parameters(), lr=1e-3, eps=1e-4)
