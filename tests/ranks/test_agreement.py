"""`all_equal` and `any_rank`: one all-reduce tells each rank what all of them were given."""

import pytest
from torch import distributed as dist

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
