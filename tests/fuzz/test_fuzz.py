"""Drawn modules in drawn layouts train as on one device; what drawing found stays as a case.

The long search: `LIGHTNING_3D_FUZZ_SECONDS=3600 LIGHTNING_3D_FUZZ_SEED=1 pytest -m long tests/fuzz -k search`.
"""

import os
import random
import time
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.check import Refused, check
from tests.fuzz.draw import cases
from tests.fuzz.found import FOUND, REFUSED
from tests.parity import in_turn, long


def drawn(start, count, wanted=lambda case: True):
    """`count` cases that depend on `start` alone.

    Hypothesis varies what it drew before, so that neighbours are alike: it draws many, in many short runs.
    """
    pool = {}
    for part in range(30):

        @seed(1000 * start + part)
        @settings(max_examples=8, deadline=None, database=None, phases=[Phase.generate],
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(cases())
        def draw(case):
            pool[repr(case)] = case

        draw()
    chosen = [case for case in pool.values() if wanted(case)]
    return random.Random(start).sample(chosen, min(count, len(chosen)))


@pytest.mark.parametrize("count", [3, long(5)])
def test_a_few_drawn_cases(count):
    refused = []
    for case in drawn(1, count):
        try:
            check(case)
        except Refused as reason:
            refused.append(reason)
    assert len(refused) <= count // 2, refused


CAN_SHOW = {
    "scaling": lambda case: "schedule" in case.strategy and case.trainer["accumulate_grad_batches"] > 1,
    "missing all-reduce": lambda case: case.strategy["tensor_parallel_size"] > 1,
    "missing sum of ties": lambda case: "schedule" in case.strategy and case.spec.tie != "none",
}


@pytest.mark.parametrize("planted", in_turn(CAN_SHOW, 2))
def test_a_planted_error_is_found(planted):
    """In the first few of the drawn cases that have what it breaks: a pipeline, tensor ranks, a tie."""
    for case in drawn(2, 4, CAN_SHOW[planted]):
        try:
            check(case, planted)
        except Refused:
            continue
        except AssertionError as difference:
            if "are not close" in str(difference):
                return
            raise
    pytest.fail("not found")


@pytest.mark.parametrize("name", in_turn(FOUND, 3))
def test_found(name):
    check(FOUND[name])


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    case, says = REFUSED[name]
    with pytest.raises(Refused, match=says):
        check(case)


@pytest.mark.long
def test_search(capsys):
    """For as long as the environment says. A find is printed as Python, to be kept in `found.py`."""
    deadline = time.monotonic() + float(os.environ.get("LIGHTNING_3D_FUZZ_SECONDS", "120"))
    start = int(os.environ.get("LIGHTNING_3D_FUZZ_SEED", "1000"))
    count, finds = Counter(), []

    def say(text):
        with capsys.disabled():
            print(text, flush=True)

    while time.monotonic() < deadline:
        for case in drawn(start, 50):
            if time.monotonic() > deadline:
                break
            try:
                check(case)
                count["same"] += 1
            except Refused as reason:
                count["refused"] += 1
                say(f"refused: {str(reason)[:300]}")
            except AssertionError as error:
                finds.append(case)
                say(f"FOUND with seed {start}: {case!r}\n{str(error)[-3000:]}\n")
        say(f"seed {start}: {dict(count)}, {len(finds)} finds")
        start += 1
    assert finds == []
