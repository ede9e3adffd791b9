"""CPU seconds of each test, and the cases that are `costly`.

    OMP_NUM_THREADS=1 python -m pytest -m "costly or not long and not gpu" -p tests.bench.costs --costs build/costs.tsv
    python -m tests.bench.costs build/costs.tsv > tests/costly.txt

Of each test with several cases the first stays short, and all that are cheap. No case is short that costs much. CPU
time is that of the test and of the processes that it starts, so it is nearly the same beside other work.
"""

import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest

CHEAP, DEAR = 0.15, 1.5
"""CPU seconds of a case that stays short, and of one that does not."""
TICKS = os.sysconf("SC_CLK_TCK")


def pytest_addoption(parser):
    parser.addoption("--costs", help="the file to which a line for each test is added")


def _cpu_seconds():
    children, seconds = defaultdict(list), {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        children[int(fields[1])].append(int(folder.name))
        seconds[int(folder.name)] = sum(map(int, fields[11:15])) / TICKS
    total, left = 0.0, [os.getpid()]
    while left:
        process = left.pop()
        total += seconds.get(process, 0.0)
        left += children[process]
    return total


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    before = _cpu_seconds()
    yield
    with Path(item.config.getoption("--costs")).open("a") as file:
        file.write(f"{item.nodeid}\t{_cpu_seconds() - before:.2f}\n")


def costly(costs):
    """The cases that are too expensive for the short run, by the costs of all."""
    tests = defaultdict(list)
    for case in costs:
        tests[case.partition("[")[0]].append(case)
    limits = [(case, CHEAP if at else DEAR) for cases in tests.values() for at, case in enumerate(cases)]
    return sorted(case for case, limit in limits if costs[case] > limit)


if __name__ == "__main__":
    lines = (line.rpartition("\t") for line in Path(sys.argv[1]).read_text().splitlines())
    print("\n".join(costly({case: float(cost) for case, _, cost in lines})))
