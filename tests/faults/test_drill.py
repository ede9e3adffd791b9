"""Faults of whole jobs: kills of random ranks (`tests/faults/drill.py`), and a restart by torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.drill import TIMEOUT, rounds


def _check(report, kills):
    print(report)
    assert report.kills >= kills
    assert report.slowest < TIMEOUT + 15
    assert report.named >= 0.9 * report.survivors


def test_short(tmp_path):
    _check(rounds(tmp_path, kills=1, steps=12, seed=0), 1)


@pytest.mark.long
def test_long(tmp_path):
    report = rounds(tmp_path, kills=100, steps=25, seed=1)
    _check(report, 100)
    assert report.inside >= 10
    assert report.rounds >= 4  # every layout


ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_goes_on_from_the_last_checkpoint(tmp_path):
    command = "-m torch.distributed.run --standalone --nproc-per-node 2 --max-restarts 1 -m tests.faults.restarted"
    done = subprocess.run(
        [sys.executable, *command.split(), str(tmp_path)],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}, capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("attempt 0 begins at 0") == 2
    assert done.stdout.count("attempt 1 begins at 4") == 2
    assert done.stdout.count("ended at 8") == 2
