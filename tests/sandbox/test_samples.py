"""One batch is looked at ahead of training, and training has the same batches as if nobody had looked."""

import functools
import itertools
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
    random_split,
)

from lightning_3d import Strategy3D
from lightning_3d.errors import UnsupportedError
from lightning_3d.sandbox.first_batch import FirstBatch, _first_of
from lightning_3d.tensor.block_calls import record_one_batch
from lightning_3d.tools.auto_layout import measure_step
from lightning_3d.tools.planner.profile_module import count_module
from tests.parity import QUIET, build, silent
from tests.workers import run
from tests.zoo.plain import MLP


class Again(IterableDataset):
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


class Shuffling(Again):
    """Has another order each time."""

    def __init__(self, batches):
        super().__init__(batches)
        self.order = torch.Generator().manual_seed(5)

    def __iter__(self):
        for at in torch.randperm(len(self.batches), generator=self.order):
            yield self.batches[at]


class Divided(Again):
    """Gives each worker a share, or what it takes from a queue."""

    queue = None

    def __iter__(self):
        worker = get_worker_info()
        for at in range(worker.id, len(self.batches), worker.num_workers):
            yield self.batches[at if self.queue is None else self.queue.get()]


def _of_workers(batches, queue=False):
    stream, forks = Divided(batches), torch.multiprocessing.get_context("fork")
    if queue:
        stream.queue = forks.SimpleQueue()
        for at in range(3 * len(batches)):
            stream.queue.put(at % len(batches))
    return DataLoader(stream, batch_size=None, num_workers=2 - queue, multiprocessing_context=forks)


class Slice:
    """A part of one endless stream, and the next part in the next epoch (gluonts)."""

    def __init__(self, stream, length):
        self.stream, self.length = iter(stream), length

    def __iter__(self):
        yield from itertools.islice(self.stream, self.length)

    def __len__(self):
        return self.length


class Slotted(Slice):
    __slots__ = ()


class Final(Slice):
    """Allows no class below it."""

    def __init_subclass__(cls):
        raise ValueError("it is final")


class Drawing(Slice):
    """Adds noise from the stream that all code shares."""

    def __iter__(self):
        for x, y in super().__iter__():
            yield x + torch.rand(()), y


class Restored(Slice):
    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        self.stream = iter(state["rest"])


class Rewinding(Slice):
    """Is its own iterator, and begins anew each time (mlcolvar)."""

    def __init__(self, batches):
        self.stream, self.length = batches, len(batches)

    def __iter__(self):
        self.part = iter(self.stream[: self.length])
        return self

    def __next__(self):
        return next(self.part)


class Numbered(list):
    """A sampler with another order in each iteration."""

    epoch = 0

    def __iter__(self):
        self.epoch += 1
        yield from torch.randperm(len(self), generator=torch.Generator().manual_seed(self.epoch)).tolist()


class Continuing(Numbered):
    """One that goes on in an endless order."""

    def __init__(self, batches):
        super().__init__(batches)
        self.order = itertools.cycle(range(len(self)))

    def __iter__(self):
        yield from itertools.islice(self.order, len(self) - 1)


class Made(Numbered):
    """One that makes its endless order when it is first asked."""

    def __iter__(self):
        if not hasattr(self, "order"):
            self.order = itertools.cycle(range(len(self)))
        yield from itertools.islice(self.order, len(self) - 1)


class Cached:
    """One whose `__iter__` returns an iterator that is made once."""

    def __init__(self, batches):
        self.count = len(batches)

    @functools.cached_property
    def order(self):
        return itertools.cycle(range(self.count))

    def __iter__(self):
        return self.order

    def __len__(self):
        return self.count


class Inside:
    """Another sampler's first indices."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        return itertools.islice(self.sampler, 3)

    def __len__(self):
        return 3


def _endless(batches):
    while True:
        yield from reversed(range(len(batches)))


def _numbering():
    numbers = itertools.count()
    return lambda batch: (batch[0] + next(numbers), batch[1])


def _adding():
    """As `_numbering`, in the plainest form; one variable around it has no value yet."""
    number = 0

    def collate(batch):
        nonlocal number
        number += 1
        return (batch[0] + number, batch[1]) if batch else later

    return collate
    later = None


class Counter:
    def __init__(self):
        self.number = 0

    def collate(self, batch):
        self.number += 1
        return batch[0] + self.number, batch[1]


class Reads(Numbered):
    """Data that count how often they are read."""

    def __getitem__(self, at):
        self.epoch += 1
        return [tensor + self.epoch for tensor in super().__getitem__(at)]


class Noise:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(5)

    def __call__(self, batch):
        return batch[0] + torch.rand((), generator=self.generator), batch[1]


class Noisy:
    """Data with a generator, or with a transform that has one."""

    def __init__(self, batches, transform=None):
        self.batches, self.transform, self.generator = batches, transform, torch.Generator().manual_seed(5)

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, at):
        return self.transform(self.batches[at]) if self.transform else Noise.__call__(self, self.batches[at])


LOADERS = {
    "list": lambda batches: DataLoader(batches, batch_size=None),
    "again": lambda batches: DataLoader(Again(batches), batch_size=None),
    "position": lambda batches: DataLoader(Position(batches), batch_size=None),
    "once": lambda batches: DataLoader(Once(batches), batch_size=None),
    "generator": lambda batches: DataLoader(Once(each for each in batches), batch_size=None),
    "iterator": iter,
    "shuffling": lambda batches: DataLoader(Shuffling(batches), batch_size=None),
    "workers": _of_workers,
    "queue": lambda batches: _of_workers(batches, queue=True),
    "slice": lambda batches: Slice(batches, 2),
    "slots": lambda batches: Slotted(batches, 2),
    "final": lambda batches: Final(batches, 2),
    "view": lambda batches: dict(enumerate(batches)).values(),
    "drawing": lambda batches: Drawing(batches, 2),
    "restored": lambda batches: Restored(batches, 2),
    "rewinding": Rewinding,
    "numbered": lambda batches: DataLoader(batches, batch_size=None, sampler=Numbered(batches)),
    "continuing": lambda batches: DataLoader(batches, batch_size=None, sampler=Continuing(batches)),
    "made": lambda batches: DataLoader(batches, batch_size=None, sampler=Made(batches)),
    "cached": lambda batches: DataLoader(batches, batch_size=None, sampler=Cached(batches)),
    "inside": lambda batches: DataLoader(batches, batch_size=None, sampler=Inside(Cached(batches))),
    "endless": lambda batches: DataLoader(batches, batch_size=None, sampler=_endless(batches)),
    "batches": lambda batches: DataLoader(
        batches, batch_sampler=([at] for at in _endless(batches)), collate_fn=lambda found: found[0]
    ),
    "numbering": lambda batches: DataLoader(batches, batch_size=None, collate_fn=_numbering()),
    "adding": lambda batches: DataLoader(batches, batch_size=None, collate_fn=_adding()),
    "method": lambda batches: DataLoader(batches, batch_size=None, collate_fn=Counter().collate),
    "partial": lambda batches: DataLoader(
        batches, batch_size=None, collate_fn=functools.partial(Counter.collate, Counter())
    ),
    "stream": lambda batches: DataLoader(Again(batches), batch_size=None, collate_fn=_numbering()),
    "counting": lambda batches: DataLoader(Reads(batches), batch_size=None),
    "subset": lambda batches: DataLoader(Subset(Noisy(batches), range(4)), batch_size=None),
    "split": lambda batches: DataLoader(random_split(Noisy(batches), [4, len(batches) - 4])[0], batch_size=None),
    "collating": lambda batches: DataLoader(batches, batch_size=None, collate_fn=Noise()),
    "transforming": lambda batches: DataLoader(Noisy(batches, Noise()), batch_size=None),
    "two": lambda batches: CombinedLoader([Slice(batches, 2), DataLoader(batches, shuffle=True)], "min_size"),
}


class Given(Callback):
    """Sees what training is given, and maybe looks ahead where the strategy does."""

    def __init__(self, looks, draws=False):
        self.looks, self.draws, self.given = looks, draws, []

    def setup(self, trainer, module, stage):
        for _ in range(2 * self.looks):
            self.calls = record_one_batch(
                FirstBatch(trainer), module, lambda batch: batch[0] if len(batch[0]) == 2 else batch
            )

    def on_fit_start(self, trainer, module):
        if self.draws:
            torch.rand(())
        source = trainer.fit_loop._data_source.instance
        if self.looks and isinstance(source, Restored):
            source.load_state_dict({"rest": module.batches})

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.given += tree_leaves(batch)


class OfFirst(MLP):
    def loss(self, batch):
        return super().loss(batch[0] if len(batch[0]) == 2 else batch)


class FromHook(OfFirst):
    """Its hook makes a part of one stream each time."""

    def train_dataloader(self):
        self.stream = vars(self).get("stream") or iter(self.batches)
        self.noise = torch.rand(())
        return Slice(self.stream, 2)


class Counting(OfFirst):
    """Its hook counts its calls in several ways, and makes a loader by the counts."""

    def __init__(self):
        super().__init__()
        self.calls, self.known, self.order = 0, {"calls": []}, torch.Generator().manual_seed(1)
        self.register_buffer("counter", torch.zeros((), dtype=torch.long))
        Counting.made = 0

    def train_dataloader(self):
        self.calls += 1
        self.known["calls"].append(self.calls)
        self.counter += 1
        Counting.made += 1
        counts = self.calls, len(self.known["calls"]), int(self.counter), Counting.made
        order = torch.randperm(6, generator=self.order).tolist()
        return DataLoader([self.batches[at] for at in (*counts, *order)], batch_size=None)


class Taking(OfFirst):
    """Its hook takes from an iterator."""

    def train_dataloader(self):
        self.left = vars(self).get("left") or iter(self.batches)
        return DataLoader([next(self.left)] * 3, batch_size=None)


HOOKS = {"hook": FromHook, "counting hook": Counting, "taking hook": Taking}


def given(kind, looks, draws=False):
    torch.manual_seed(3)
    module, look = HOOKS.get(kind, OfFirst)(), Given(looks, draws)
    module.batches = [tuple(tensor[at : at + 4] for tensor in module.tensors()) for at in range(0, 24, 4)]
    with silent():
        loader = None if kind in HOOKS else LOADERS[kind](module.batches)
        Trainer(**QUIET, max_epochs=2, limit_train_batches=6, limit_val_batches=0, callbacks=[look]).fit(module, loader)
    return look, module


@pytest.mark.parametrize("kind", [*LOADERS, *HOOKS])
def test_training_has_the_batches_of_a_run_without_a_look(kind):
    wanted, _ = given(kind, False)
    look, _ = given(kind, True)
    assert look.calls is not None
    assert len(look.given) == len(wanted.given) > 2
    assert all(map(torch.equal, look.given, wanted.given))


class Images(Noisy):
    """Images by name, and how often they were read."""

    def __init__(self, batches):
        super().__init__(batches)
        self.images = {at: batches[at % len(batches)][0].numpy() for at in range(200)}
        self.read = {"times": [0]}

    def __getitem__(self, at):
        self.read["times"][0] += 1
        assert self.images[at] is self.owned[at], "the images were copied"
        return super().__getitem__(at)


def test_a_look_copies_counts_and_not_the_images_of_a_dataset():
    module = OfFirst()
    data = Images([tuple(tensor[:4] for tensor in module.tensors())])
    data.owned = tuple(data.images.values())
    with silent():
        loaders = SimpleNamespace(combined=CombinedLoader(DataLoader(data, batch_size=None)), owner=None)
        assert _first_of(loaders, None, ExitStack()) is not None
    assert data.read == {"times": [0]}


def test_a_loader_is_the_users_own_object_after_its_first_batch():
    _, module = given("slice", True)
    assert type(module.trainer.train_dataloader) is Slice
    assert len(module.trainer.train_dataloader) == 2


def test_a_sampler_that_goes_on_is_refused_where_lightning_divides_its_samples():
    batches = [tuple(tensor[:4] for tensor in OfFirst().tensors())] * 4
    loader = LOADERS["continuing"](batches)
    source = SimpleNamespace(instance=None)
    strategy = SimpleNamespace(process_dataloader=lambda loader: None)
    with silent():
        _first_of(SimpleNamespace(combined=CombinedLoader(loader), source=source, owner=None), strategy, ExitStack())
    divided = type(loader)(batches, sampler=DistributedSampler(batches, 2, 0))  # as Lightning does
    with pytest.raises(UnsupportedError, match="Make the iterator in `__iter__`, count in an attribute, or divide"):
        iter(divided)


class Predicts(OfFirst):
    def setup(self, stage):
        FirstBatch(self.trainer)()

    def predict_step(self, batch):
        return batch[1]


def test_a_loader_that_lightning_builds_anew_begins_with_what_was_read():
    """It does so to predict, by the class that the loader has then."""
    module, trainer = Predicts(), Trainer(**QUIET)
    batches = [tuple(tensor[at : at + 4] for tensor in module.tensors()) for at in range(0, 24, 4)]
    with silent():
        found = trainer.predict(module, LOADERS["once"](batches))
    assert torch.equal(torch.cat(found), torch.cat([y for _, y in batches]))
    assert type(trainer.predict_dataloaders) is DataLoader


def test_a_hook_that_draws_before_data_that_was_read_ahead_is_refused():
    given("slice", True, draws=True)
    with pytest.raises(UnsupportedError, match="Draw from a generator of its own in the data"):
        given("drawing", True, draws=True)


def _order(look, module, loader):
    """The first sample of each batch that training is given, after `look`."""
    given = []

    class Looking(Callback):
        def setup(self, trainer, module, stage):
            look(trainer, module)

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            given.append(float(batch[0][0, 0]))

    torch.manual_seed(3)
    with silent():
        Trainer(**QUIET, max_epochs=1, callbacks=[Looking()]).fit(module, loader)
    return given


LOOKS = {
    "tensor": lambda trainer, module: record_one_batch(FirstBatch(trainer), module, lambda batch: batch),
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


class Padding(MLP):
    """A loader with a function that knows the module, and by it the Trainer of the run."""

    def train_dataloader(self):
        data = TensorDataset(*self.tensors())
        return DataLoader(data, batch_size=4, shuffle=True, collate_fn=lambda samples: self.pad(samples))

    def pad(self, samples):
        return default_collate(samples)


def _padded(looks):
    seed_everything(7, verbose=False)
    module, given = Padding(), []

    class Looking(Callback):
        def setup(self, trainer, module, stage):
            if looks:
                FirstBatch(trainer)()

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            given.append(float(batch[0][0, 0]))

    flags = QUIET | {"use_distributed_sampler": True, "devices": 2, "max_epochs": 1, "limit_val_batches": 0}
    Trainer(**flags, strategy=Strategy3D(quiet=True), callbacks=[Looking()]).fit(module)
    return given


def test_a_function_that_knows_the_run_is_no_reason_to_read_its_loader_once():
    assert run(_padded, True, world=2) == run(_padded, False, world=2)
