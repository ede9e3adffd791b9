"""A job under `torchrun --max-restarts` goes on by itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
