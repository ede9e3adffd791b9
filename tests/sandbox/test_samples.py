"""One batch is looked at ahead of training, and training has the same batches as if nobody had looked."""

import warnings

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_3d.auto_layout import measure_step
from lightning_3d.planner.profile_module import count_module
from lightning_3d.tensor.block_calls import record_one_batch
from tests.parity import QUIET, build


class Again(IterableDataset):
    """Begins anew each time."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        yield from self.batches


class Once(Again):
    """What came has gone."""

    def __init__(self, batches):
        self.batches = iter(batches)


class Position(Again):
    """Goes on where it was."""

    def __init__(self, batches):
        super().__init__(batches)
        self.state = {"at": 0}

    def __iter__(self):
        while self.state["at"] < len(self.batches):
            self.state["at"] += 1
            yield self.batches[self.state["at"] - 1]


LOADERS = {
    "list": (lambda batches: DataLoader(batches, batch_size=None), True),
    "again": (lambda batches: DataLoader(Again(batches), batch_size=None), True),
    "position": (lambda batches: DataLoader(Position(batches), batch_size=None), True),
    "once": (lambda batches: DataLoader(Once(batches), batch_size=None), False),
    "iterator": (iter, False),
}


class Candidates(Callback):
    """Looks ahead where the strategy does, and sees what training is given."""

    def __init__(self):
        self.given = []

    def setup(self, trainer, module, stage):
        self.calls = record_one_batch(trainer, module, lambda batch: batch)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.given.append(batch)


@pytest.mark.parametrize("kind", LOADERS)
def test_training_has_the_batch_that_was_looked_at(kind):
    make, looked_at = LOADERS[kind]
    module, look = build("MLP"), Candidates()
    batches = [tuple(tensor[at : at + 4] for tensor in module.tensors()) for at in (0, 4, 8)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Trainer(**QUIET, max_epochs=1, callbacks=[look]).fit(module, make(batches))
    assert all(torch.equal(given[0], batch[0]) for given, batch in zip(look.given, batches, strict=True))
    assert (look.calls is not None) is looked_at
    assert any("read only once" in str(warning.message) for warning in said) is not looked_at


def _order(look, module, loader):
    """The first sample of each batch that training is given, after `look`."""
    given = []

    class Looking(Callback):
        def setup(self, trainer, module, stage):
            look(trainer, module)

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            given.append(float(batch[0][0, 0]))

    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(**QUIET, max_epochs=1, callbacks=[Looking()]).fit(module, loader)
    return given


LOOKS = {
    "tensor": lambda trainer, module: record_one_batch(trainer, module, lambda batch: batch),
    "auto": lambda trainer, module: measure_step(
        trainer, module, lambda batch: batch, count_module(module, name="MLP")
    ),
}


@pytest.mark.parametrize("own", [True, False], ids=["own generator", "main stream"])
@pytest.mark.parametrize("look", LOOKS)
def test_looking_does_not_change_the_order(look, own):
    def loader():
        generator = torch.Generator().manual_seed(5) if own else None
        return DataLoader(TensorDataset(*build("MLP").tensors()), batch_size=4, shuffle=True, generator=generator)

    expected = _order(lambda *_: None, build("MLP"), loader())
    assert _order(LOOKS[look], build("MLP"), loader()) == expected
