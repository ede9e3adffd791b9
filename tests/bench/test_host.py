"""The bars of the host: CPU time of the main thread in one step, beside Lightning's own strategies in one race."""

import pytest

from tests.bench.bench_host import ROWS, measure, ratio


@pytest.mark.long
def test_a_step_costs_the_host_no_more_than_its_bar():
    found = measure(list(ROWS), steps=20, rounds=7, say=lambda text: None)
    ratios = {name: ratio(found, name) for name, (_, base, _) in ROWS.items() if base}
    assert {name: each for name, each in ratios.items() if each > ROWS[name][2]} == {}
