"""Marks the cases of `tests/costly.txt` as `costly`, and so as `long`: CI runs them behind `make test`.

Files that import `time` or `squad` wait for seconds. A shared machine may stand still for longer, so that each of
their cases gets a second try.
"""

from pathlib import Path

import pytest

COSTLY = frozenset((Path(__file__).parent / "costly.txt").read_text().splitlines())
GONE = pytest.StashKey[list[str]]()


def pytest_addoption(parser):
    parser.addoption("--part", help="K/N: of `long` cases that are not costly every N-th alone, from the K-th on")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(config, items):
    for item in items:
        if item.nodeid in COSTLY:
            item.add_marker(pytest.mark.costly)
            item.add_marker(pytest.mark.long)
        if hasattr(item.module, "time") or hasattr(item.module, "squad"):
            item.add_marker(pytest.mark.flaky(reruns=1))
    if config.option.part:
        at, parts = map(int, config.option.part.split("/"))
        rare = [item for item in items if item.get_closest_marker("long") and item.nodeid not in COSTLY]
        others = {item for place, item in enumerate(rare) if (place - at) % parts}
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]
    collected = {item.nodeid for item in items}
    files = {case.split("::")[0] for case in collected} if "::" not in "".join(config.args) else ()
    config.stash[GONE] = sorted(case for case in COSTLY - collected if case.split("::")[0] in files)


@pytest.fixture
def gone(request):
    """Costly cases that do not exist in the files that were collected."""
    return request.config.stash[GONE]


@pytest.fixture
def no_user_files(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
