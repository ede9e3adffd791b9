"""Marks the cases of `tests/costly.txt` as `costly`, and so as `long`: CI runs them behind `make test`."""

from pathlib import Path

import pytest

COSTLY = frozenset((Path(__file__).parent / "costly.txt").read_text().splitlines())


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.nodeid in COSTLY:
            item.add_marker(pytest.mark.costly)
            item.add_marker(pytest.mark.long)
    collected = {item.nodeid for item in items}
    files = {case.split("::")[0] for case in collected} if "::" not in "".join(config.args) else ()
    gone = sorted(case for case in COSTLY - collected if case.split("::")[0] in files)
    if gone:
        raise pytest.UsageError(f"tests/costly.txt names cases that do not exist: {gone}")
