"""The fault drill: kills of random ranks at random moments; see `tests/faults/drill.py`."""

import pytest

from tests.faults.drill import TIMEOUT, rounds


def _check(report, kills):
    print(report)
    assert report.kills >= kills
    assert report.slowest < TIMEOUT + 15
    assert report.named >= 0.9 * report.survivors


def test_short(tmp_path):
    _check(rounds(tmp_path, kills=1, steps=12, seed=0), 1)


@pytest.mark.long
def test_long(tmp_path):
    report = rounds(tmp_path, kills=100, steps=25, seed=1)
    _check(report, 100)
    assert report.inside >= 10
    assert report.rounds >= 4  # every layout
