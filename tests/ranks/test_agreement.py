"""`all_equal` and `any_rank`: one all-reduce tells each rank what all of them were given."""

import time

import pytest
from torch import distributed as dist

from lightning_3d.errors import DivergenceError, UnsupportedError
from lightning_3d.ranks import agreement, talk
from tests.workers import run


def answers(values):
    value = values[dist.get_rank()]
    return talk.all_equal(value), talk.any_rank(value == "odd")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([{"a": (1, None)}] * 3, (True, False)),
        (["even", "even", "odd"], (False, True)),
        (["odd", "even", "even"], (False, True)),
        (["odd"] * 3, (True, True)),
    ],
)
def test_every_rank_gets_the_same_answer(values, expected):
    assert run(answers, values, world=3, group=True) == [expected] * 3


def fails(rank):
    def make():
        if dist.get_rank() == rank:
            raise ValueError("no such layout")
        return dist.get_rank()

    try:
        return agreement.together(make, ValueError)
    except Exception as error:
        return f"{error}"


def test_an_error_of_one_rank_is_raised_on_all():
    assert run(fails, 9, world=3, group=True) == [0, 1, 2]
    found = run(fails, 2, world=3, group=True)
    assert all("no such layout" in text for text in found), found


def fails_within(rank, kind):
    """One rank fails before a message that the others already wait for."""

    def make():
        if dist.get_rank() == rank:
            raise kind("no such block")
        dist.barrier()

    agreement.PATIENCE = 0.5
    began = time.monotonic()
    try:
        agreement.together(make)
    except Exception as error:
        alone = agreement.is_alone(error)
        if dist.get_rank() == rank:
            dist.destroy_process_group()  # as a run that fails does: others stop waiting
        return f"{error}", alone, time.monotonic() - began < 5


def test_where_others_wait_in_a_message_the_failing_rank_ends_that():
    found = run(fails_within, 1, KeyError, world=3, group=True)
    assert all(alone and quick for _, alone, quick in found), found
    assert "no such block" in found[1][0]


def fails_after_another(seconds):
    """Rank 1 fails and leaves; rank 2 fails later, or just then, while rank 0 waits in a message."""
    agreement.PATIENCE, rank = 0.5, dist.get_rank()
    wait = dist.barrier if rank == 0 else lambda: time.sleep(seconds if rank == 2 else 0)
    began = time.monotonic()
    try:
        wait()
        agreement.agree(KeyError(f"of rank {rank}"))
    except Exception as error:
        took = time.monotonic() - began
        alone = agreement.is_alone(error)
        if rank:
            time.sleep(2)  # the process goes on, as in a notebook
            dist.destroy_process_group()
        return f"{error}", alone, took


@pytest.mark.parametrize("seconds", [0.0, 0.5, 1.0])
def test_a_second_rank_that_fails_does_not_wait_for_one_that_has_left(seconds):
    """It would take the note of the first one for its arrival, and wait in a message."""
    _, *failing = run(fails_after_another, seconds, world=3, group=True)
    assert [(text, alone) for text, alone, _ in failing] == [("'of rank 1'", True), ("'of rank 2'", True)]
    assert all(took < 1.8 for _, _, took in failing)


def differ(kind):
    """Two ranks fail, each in its own way; one goes another way than the rest."""
    rank = dist.get_rank()
    try:
        agreement.agree(kind(f"of rank {rank}") if rank else None)
    except Exception as error:
        first = f"{type(error).__name__} {error} {getattr(error, 'rank', None)}"
    with pytest.raises(DivergenceError, match="The ranks went different ways"):
        agreement.agree(at="block 1" if rank == 2 else "block 0")
    return first


def test_the_first_error_counts_and_keeps_its_type_and_rank():
    assert run(differ, UnsupportedError, world=3, group=True) == ["UnsupportedError of rank 1 1"] * 3
    found = run(differ, KeyError, world=3, group=True)
    assert found == ["RunError rank 1: KeyError: 'of rank 1' 1", "KeyError 'of rank 1' None", found[0]]
