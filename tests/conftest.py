"""Marks the cases of `tests/costly.txt` as `costly`, and so as `long`: CI runs them behind `make test`."""

from pathlib import Path

import pytest

COSTLY = frozenset((Path(__file__).parent / "costly.txt").read_text().splitlines())
GONE = pytest.StashKey[list[str]]()


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.nodeid in COSTLY:
            item.add_marker(pytest.mark.costly)
            item.add_marker(pytest.mark.long)
    collected = {item.nodeid for item in items}
    files = {case.split("::")[0] for case in collected} if "::" not in "".join(config.args) else ()
    config.stash[GONE] = sorted(case for case in COSTLY - collected if case.split("::")[0] in files)


@pytest.fixture
def gone(request):
    """Costly cases that do not exist in the files that were collected."""
    return request.config.stash[GONE]
