"""Streams are looked at ahead of training. Then each batch comes once and in order, as on one device."""

import math

import pytest
import torch
from lightning.pytorch import Callback, seed_everything

from tests.parity import in_turn, make_trainer
from tests.sandbox.test_samples import LOADERS, Slice
from tests.workers import run
from tests.zoo.plain import MLP


class Stateful(Slice):
    """Not a DataLoader, but it can say where it is."""

    def __init__(self, batches):
        self.batches, self.at = batches, 0

    def __iter__(self):
        while self.at < len(self.batches):
            self.at += 1
            yield self.batches[self.at - 1]
        self.at = 0

    def __len__(self):
        return len(self.batches)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Saves(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 1:
            trainer.save_checkpoint(module.path)


class Keeping(MLP):
    """Keeps its stream, and validates with it."""

    def train_dataloader(self):
        return self.loader

    val_dataloader = train_dataloader

    def validation_step(self, batch, batch_idx):
        self.seen.append(float(self.loss(batch)))


class ByHand(Keeping):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self.step_by_hand(self.optimizers(), batch)
        self.seen.append(float(loss.detach()))
        return {"value": loss.detach()}

    def on_train_batch_end(self, *_):
        """Nothing is logged."""


def _trained(kind, sizes, path, how):
    """The losses of a run, or of one that goes on in mid-epoch."""
    seed_everything(3, verbose=False)
    module = {"resumed": MLP, "by hand": ByHand}.get(how, Keeping)()
    batches = [tuple(tensor[at : at + 4] for tensor in module.tensors()) for at in range(0, 24, 4)]
    make = {**LOADERS, "stateful": Stateful}[kind]

    def trainer(**flags):
        return make_trainer(math.prod(sizes.values()), sizes or None, quiet=True, limit_val_batches=3, **flags)

    module.loader, module.path = make(batches), path
    if how == "validated":
        trainer().validate(module, verbose=False)
    elif how != "resumed":
        trainer(max_epochs=2).fit(module, val_dataloaders=LOADERS["list"](batches))
    else:
        trainer(max_steps=3, callbacks=[Saves()]).fit(module, make(batches))
        trainer(max_epochs=1).fit(module, make(batches), ckpt_path=path)
    return module.seen


STREAMS = ("queue", "once", "drawing", "workers", "final", "shuffling", "position", "iterator", "view", "restored")
CASES = [
    *in_turn([(kind, "trained") for kind in STREAMS], 3),
    *in_turn([(kind, "resumed") for kind in ("stateful", "position", "workers")], 3),
    *in_turn([(kind, "validated") for kind in ("stateful", "slice")], 2),
]
LAYOUTS = [{"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}]


@pytest.mark.parametrize("sizes", in_turn(LAYOUTS, 2))
@pytest.mark.parametrize(("kind", "how"), CASES)
def test_a_stream_trains_as_on_one_device(kind, how, sizes, tmp_path):
    (wanted,) = run(_trained, kind, {}, str(tmp_path / "one"), how, world=1)
    assert len(wanted) > 4 or how == "validated"
    for got in run(_trained, kind, sizes, str(tmp_path / "some"), how, world=math.prod(sizes.values())):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_stream_that_a_step_by_hand_keeps(tmp_path):
    test_a_stream_trains_as_on_one_device("stateful", "by hand", {"tensor_parallel_size": 2}, tmp_path)
