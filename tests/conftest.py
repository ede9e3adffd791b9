"""Marks the cases of `tests/costly.txt` as `costly`, and so as `long`: CI runs them behind `make test`."""

from pathlib import Path

import pytest

COSTLY = frozenset((Path(__file__).parent / "costly.txt").read_text().splitlines())


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid in COSTLY:
            item.add_marker(pytest.mark.costly)
            item.add_marker(pytest.mark.long)
