"""Marks the cases of `tests/long_cases.txt` as `long`. They cost much, and a case of the same test stays short."""

from pathlib import Path

import pytest

LONG = frozenset((Path(__file__).parent / "long_cases.txt").read_text().splitlines())


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid in LONG:
            item.add_marker(pytest.mark.long)
