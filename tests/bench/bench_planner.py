"""Predicted beside measured for 16 layouts of three modules: `python -m tests.bench.bench_planner [--modules GPT]`.

Calibrates this machine first. A step's time is the quickest of several, as in the calibration: what else the machine does
only ever adds.
"""

import argparse
import os
import tempfile
from pathlib import Path

from lightning_3d.dryrun.forecast import Forecast
from lightning_3d.planner.calibration import calibrate, write_entry
from lightning_3d.planner.catalogue import CALIBRATED
from tests.planner.sized import LAYOUTS, SIZED
from tests.planner.watching import Measured, by_axis, in_order, predicted, seconds, watch
from tests.workers import run


def line(name: str, layout: str, said: Forecast, seen: Measured) -> str:
    states = all(
        (rank.states.weights, rank.states.optimizer) == (one["weights"], one["optimizer"])
        for rank, one in zip(said.ranks, seen, strict=True)
    )
    sent = all(
        {axis: amount for axis, amount in rank.sent.items() if amount} == by_axis(one["sent"][-1])
        for rank, one in zip(said.ranks, seen, strict=True)
    )
    peaks = [rank.peak / one["peak"] for rank, one in zip(said.ranks, seen, strict=True)]
    real, time = seconds(seen), said.plan.time.total
    return (
        f"{name:<12} {layout:<19} {_exact(states):>6} {_exact(sent):>6} {min(peaks):5.2f} {max(peaks):5.2f}"
        f" {1e3 * time:8.1f} {1e3 * real:8.1f} {time / real:6.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", nargs="+", choices=SIZED, default=list(SIZED))
    modules = parser.parse_args().modules
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CONFIG_HOME"] = folder
        write_entry(calibrate(CALIBRATED), Path(folder) / "lightning-3d/hardware/this-machine.yaml")
        print(f"{'module':<12} {'layout':<19} states  bytes     peak       ms said     seen  ratio")
        for name in modules:
            pairs = []
            for layout in LAYOUTS:
                said = predicted(name, layout)
                seen = run(watch, name, layout, world=int(layout.split()[0]), timeout=120)
                pairs.append((said.plan.time.total, seconds(seen)))
                print(line(name, layout, said, seen), flush=True)
            within = sum(1 / 1.3 <= a / b <= 1.3 for a, b in pairs)
            print(f"{name}: {within} of {len(pairs)} times within 30%, {in_order(pairs):.0%} of the pairs in order")


def _exact(same: bool) -> str:
    return "exact" if same else "OFF"


if __name__ == "__main__":
    main()
