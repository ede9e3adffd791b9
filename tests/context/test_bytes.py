"""Bytes of the exchange, by the closed form of docs/long.md, in a dry run and in a real one."""

import pytest

from lightning_3d.layout import CONTEXT_AXIS
from tests.dryrun.compare import dry
from tests.dryrun.test_same import assert_same

ROWS, LENGTH, WIDTH, LAYERS = 12, 8, 16, 3
"""Of the module GPT, whose four heads two ranks divide."""
STRATEGY = {"context_parallel_size": 2, "zero_stage": 1}


def closed_form(ranks: int) -> float:
    """Numbers that a rank sends in a step: heads in each block, and the stream at both ends."""
    part = ROWS * LENGTH / ranks * WIDTH
    return LAYERS * 8 * (ranks - 1) / ranks * part + 2 * (ranks - 1) * part


def test_a_dry_run_sends_the_closed_form():
    report = dry("GPT", "1x2xcpu", STRATEGY, ranks=range(2))
    assert report.errors == ()
    for rank in report.ranks:
        assert sum(row.bytes for row in rank.sent if row.axis == CONTEXT_AXIS) == 4 * closed_form(2)


@pytest.mark.long
def test_a_real_run_is_as_the_dry_one():
    assert_same("GPT", 2, STRATEGY, setup=False)
