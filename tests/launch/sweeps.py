"""Runs a Hydra sweep as a user starts it, one command in a process of its own, and looks at what each rank saw."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from itertools import chain
from pathlib import Path

import pytest

from tests.launch.sweep.train import BATCH

SCRIPT = Path(__file__).parent / "sweep" / "train.py"
ROOT = Path(__file__).parents[2]
STEPS = 2


def sweep(folder, *overrides, **variables):
    """Exit code, output, and what each rank of each job wrote."""
    environment = {key: value for key, value in os.environ.items() if key not in ("LOCAL_RANK", "WORLD_SIZE", "RANK")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}
    command = [sys.executable, str(SCRIPT), "-m", *overrides, "hydra.sweep.dir=out"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    jobs = defaultdict(list)
    for file in (folder / "out").glob("*/seen.jsonl"):
        jobs[int(file.parent.name)] = [json.loads(line) for line in file.read_text().splitlines()]
    return done.returncode, done.stdout + done.stderr, jobs


def assert_right(jobs, wanted):
    """Each job ran once on each of its own ranks, with its own parameters and samples, and all learned the same."""
    for number, (world, overrides) in wanted.items():
        ranks = jobs[number]
        assert sorted(seen["rank"] for seen in ranks) == list(range(world)), (number, ranks)
        for seen in ranks:
            assert seen["world"] == world
            assert seen["job"] == number
            assert seen["overrides"] == overrides
            assert seen["losses"] == pytest.approx(ranks[0]["losses"])
    steps = [samples_of_each_step(jobs[number]) for number in wanted]
    assert sorted(chain.from_iterable(steps[0])) == list(range(STEPS * BATCH))
    assert all(step == steps[0] for step in steps)
    losses = [jobs[number][0]["losses"] for number in wanted]
    assert len(losses[0]) == STEPS
    assert all(loss == pytest.approx(losses[0], rel=1e-4) for loss in losses)


def samples_of_each_step(ranks):
    """Which samples the data ranks shared out; their tensor and pipeline peers see the same ones."""
    by_data = {}
    for seen in ranks:
        assert by_data.setdefault(seen["data"], seen["samples"]) == seen["samples"]
    return [sorted(index for samples in by_data.values() for index in samples[step]) for step in range(STEPS)]
