"""The seconds of a step after calibration, against those of real ones. Means something on a machine left alone."""

import pytest

from lightning_3d.planner.calibration import calibrate, write_entry
from lightning_3d.planner.catalogue import CALIBRATED
from tests.planner.watching import in_order, predicted_seconds, quickest, step_times
from tests.workers import run
from tests.zoo.registry import members
from tests.zoo.sized import LAYOUTS

ROUNDS = 2
"""One after the other over all layouts: what else the machine does in one of them is not there in both."""


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("config")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder))
        write_entry(calibrate(CALIBRATED), folder / "lightning-3d" / "hardware" / "this-machine.yaml")
        predicted_seconds.cache_clear()
        yield
        predicted_seconds.cache_clear()


@pytest.mark.long
@pytest.mark.parametrize("name", members("sized"))
def test_seconds_of_a_step_after_calibration(calibrated, name):
    said = [predicted_seconds(name, layout) for layout in LAYOUTS]
    rounds = [[measured(name, layout) for layout in LAYOUTS] for _ in range(ROUNDS)]
    seen = list(map(min, zip(*rounds, strict=True)))
    ratios = {layout: round(a / b, 2) for layout, a, b in zip(LAYOUTS, said, seen, strict=True)}
    assert in_order(list(zip(said, seen, strict=True))) >= 0.8, ratios
    close = [1 / 1.3 <= ratio <= 1.3 for ratio in ratios.values()]
    assert sum(close) >= 0.75 * len(close), ratios
    assert all(0.5 <= ratio <= 2 for ratio in ratios.values()), ratios


def measured(name, layout):
    return quickest(run(step_times, name, layout, world=int(layout.split()[0]), timeout=120))
