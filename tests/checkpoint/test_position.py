"""Resumed in the middle of an epoch, a run neither repeats nor skips samples."""

from collections import Counter
from itertools import chain

import pytest
from torch.utils.data import DataLoader, RandomSampler

from lightning_3d.data.position import counted, counter_of
from tests.checkpoint.readers import BATCH, SAMPLES, Own, RemoteNumbers, read, read_on
from tests.parity import in_turn, long
from tests.workers import run

SHARDED, FULL = {"checkpoint_format": "sharded"}, {"checkpoint_format": "full"}
OWN = {"use_distributed_sampler": False}


@pytest.mark.parametrize(
    ("attributes", "trainer", "stop", "world"),
    [
        ({}, {}, 11, 2),
        long({"workers": 1}, {}, 11, 2),
        long({"workers": 2, "estimates": True}, {}, 17, 1),
        long({"workers": 2, "persistent": True}, {}, 21, 1),
        long({"augmented": True}, {}, 17, 1),
        ({"loader": "weighted"}, {}, 5, 2),
        long({}, {"limit_train_batches": 5}, 7, 1),
        long({}, {"accumulate_grad_batches": 2}, 10, 1),
        long({"loader": "two"}, {}, 18, 1),
        ({"loader": "stateful"}, {}, 13, 2),
        long({"loader": "stateful", "estimates": True}, {}, 13, 1),
        ({}, OWN, 17, 1),
        long({"workers": 1}, OWN, 17, 1),
        long({"loader": "generator"}, OWN, 17, 1),
        long({"loader": "unbatched"}, OWN, 70, 1),
        long({"loader": "unbatched"}, {}, 70, 1),
        long({"loader": "own"}, OWN, 17, 1),
        ({}, {"limit_val_batches": 1.0, "val_check_interval": 5}, 20, 1),
        long({}, {"max_epochs": -1, "max_steps": 40}, 15, 1),
    ],
    ids=str,
)
def test_goes_on_as_if_uninterrupted(tmp_path, attributes, trainer, stop, world):
    path, strategy = str(tmp_path / "x.ckpt"), SHARDED if world == 2 else FULL
    for whole, before, after in run(read_on, world, strategy, attributes, trainer, stop, path, world=world):
        assert before[0]
        assert after[0]
        for had, rest, everything in zip(before, after, whole, strict=True):
            assert had + rest == everything


@pytest.mark.parametrize("world", [1, long(2)])
def test_goes_on_from_what_was_saved_after_fit(tmp_path, world):
    """By a script that looks back, validates and draws in between."""
    path, strategy, until = str(tmp_path / "x.ckpt"), SHARDED if world == 2 else FULL, {"max_epochs": 1}
    for whole, before, after in run(read_on, world, strategy, {"workers": 1}, {}, 0, path, until, world=world):
        assert after[0]
        for had, rest, everything in zip(before, after, whole, strict=True):
            assert had + rest == everything


def epoch(ranks, number):
    """How often each sample was given in an epoch, to any rank."""
    return Counter(sample for given, _ in ranks for at, _, batch in given if at == number for sample in batch)


MOVES = [
    ((2, {}), (3, {"zero_stage": 3}), 11),
    ((3, {}), (1, {}), 8),
    ((1, {}), (2, {"tensor_parallel_size": 2}), 20),
    ((1, {}), (2, {}), 20),
    ((1, {}), (3, {}), 18),
    ((2, {}), (2, {"tensor_parallel_size": 2}), 11),
]
LOADERS = ["shuffled", "ordered", "generator", "subset"]
ELSEWHERE = [
    pytest.param(*move, loader, marks=() if (row + column) % 4 == 0 else pytest.mark.long, id=f"{move}-{loader}")
    for row, move in enumerate(MOVES)
    for column, loader in enumerate(LOADERS)
]


@pytest.mark.parametrize(("before", "after", "stop", "loader"), in_turn(ELSEWHERE, 2))
def test_on_another_number_of_data_ranks(tmp_path, before, after, stop, loader):
    """Where one data rank has the user's own sampler and several have Lightning's, too."""
    path, attributes = str(tmp_path / "x.ckpt"), {"loader": loader}
    (world, layout), (new_world, new_layout) = before, after
    first = run(read, world, {**SHARDED, **layout}, attributes, {}, stop, path, world=world)
    then = run(read, new_world, {**SHARDED, **new_layout}, attributes, {}, None, None, path, world=new_world)
    if "tensor_parallel_size" in new_layout:
        assert then[0] == then[1]
        then = then[:1]
    assert epoch(first + then, 1) == Counter(range(SAMPLES))
    assert epoch(then, 2) == Counter(range(SAMPLES))
    assert epoch(first, 1)
    assert epoch(then, 1)
    (given, _), *_ = then
    batches = [index for at, index, _ in given if at == 2]
    assert batches == list(range(len(batches)))
    assert [index for at, index, _ in given if at == 1][-1] == len(batches) - 1


@pytest.mark.parametrize("after", [1, 3])
def test_an_order_that_is_not_shuffled_stays_so(tmp_path, after):
    path, attributes = str(tmp_path / "x.ckpt"), {"loader": "in turn"}
    first = run(read, 2, FULL, attributes, {}, 11, path, world=2)
    then = run(read, after, FULL, attributes, {}, None, None, path, world=after)
    assert epoch(first + then, 1) == Counter(range(SAMPLES))
    for number, had in ((1, 24), (2, 0)):
        steps = zip(*([batch for at, _, batch in given if at == number] for given, _ in then), strict=True)
        assert [sample for step in steps for sample in sorted(chain(*step))] == list(range(had, SAMPLES))


@pytest.mark.parametrize("loader", ["shuffled", "ordered"])
def test_an_epoch_that_plain_lightning_has_saved_goes_on_as_there(tmp_path, loader):
    """Its checkpoint has no position: the loader begins again, and so does the order that it draws."""
    path, more = str(tmp_path / "plain.ckpt"), ({"loader": loader}, {})
    run(read, 1, None, *more, 3, path, world=1)
    (wanted,) = run(read, 1, None, *more, None, None, path, world=1)
    for got in run(read, 2, {"tensor_parallel_size": 2}, *more, None, None, path, world=2):
        rest = [each for each in wanted[0] if not each[0]]
        assert got[0][: len(rest)] == rest  # the noise of steps comes from another stream


def test_the_users_loader_stays_as_it_is_and_looks_the_same():
    inner = Own(range(SAMPLES), BATCH, False)
    loader = DataLoader(RemoteNumbers(), batch_sampler=inner)
    ours = counted(loader)
    assert loader.batch_sampler is inner
    assert isinstance(ours.batch_sampler, Own)
    assert isinstance(counted(DataLoader(RemoteNumbers(), batch_size=None, shuffle=True)).sampler, RandomSampler)
    assert ours.batch_sampler.batch_size == BATCH
    assert len(ours) == len(loader)
    assert counter_of(ours).inner is inner
    assert counter_of(loader) is None
