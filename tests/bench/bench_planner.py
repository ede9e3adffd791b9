"""Predicted beside measured seconds for 16 layouts of three modules: `python -m tests.bench.bench_planner`.

Calibrates this machine first. A step's time is the quickest of several, as in the calibration: what else the machine does
only ever adds.
"""

import argparse
import os
import tempfile
from pathlib import Path

from lightning_3d.planner.calibration import calibrate, write_entry
from lightning_3d.planner.catalogue import CALIBRATED
from tests.planner.watching import in_order, predicted_seconds, quickest, step_times
from tests.workers import run
from tests.zoo.registry import members
from tests.zoo.sized import LAYOUTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--modules", nargs="+", choices=members("sized"), default=list(members("sized")))
    modules = parser.parse_args().modules
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CONFIG_HOME"] = folder
        write_entry(calibrate(CALIBRATED), Path(folder) / "lightning-3d/hardware/this-machine.yaml")
        print(f"{'module':<12} {'layout':<19} predicted ms  measured ms  ratio")
        for name in modules:
            pairs = []
            for layout in LAYOUTS:
                predicted = predicted_seconds(name, layout)
                measured = quickest(run(step_times, name, layout, world=int(layout.split()[0]), timeout=120))
                pairs.append((predicted, measured))
                ratio = predicted / measured
                print(
                    f"{name:<12} {layout:<19} {1e3 * predicted:12.1f} {1e3 * measured:12.1f} {ratio:6.2f}", flush=True
                )
            within = sum(1 / 1.3 <= a / b <= 1.3 for a, b in pairs)
            print(f"{name}: {within} of {len(pairs)} times within 30%, {in_order(pairs):.0%} of the pairs in order")


if __name__ == "__main__":
    main()
