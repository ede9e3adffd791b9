"""Memory and speed of a training with weights and states on a disk, of real size."""

import shutil

import pytest

from tests.bench.bench_offload import CASES, measure
from tests.workers import run


def _measured(case, folder, steps):
    world, size, strategy, offload = CASES[case]
    return run(measure, world, size, strategy, offload, str(folder), "0.5GB", steps, world=world, timeout=3000)


def _needs(folder, nbytes):
    if shutil.disk_usage(folder).free < nbytes:
        pytest.skip(f"the disk of {folder} has no {nbytes / 1e9:.0f} GB")


@pytest.mark.long
@pytest.mark.parametrize(("case", "most"), [("states", 4.4e9), ("all", 2.8e9)])
def test_resident_memory_of_400_million_parameters(case, most, tmp_path):
    """AdamW in fp32 on one process: 6.4 GB of weights, gradients and states, of which 1.6 GB are gradients."""
    _needs(tmp_path, 8e9)
    (got,) = _measured(case, tmp_path, 2)
    assert got["peak"] <= most
    assert sum(moved for _, moved, _, _ in got["steps"][1:]) > 6e9
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_one_and_a_half_billion_parameters_use_half_of_the_disk(tmp_path):
    """24 GB of weights, gradients and states on two processes."""
    _needs(tmp_path, 30e9)
    for got in _measured("large", tmp_path, 3):
        assert len(got["losses"]) == 3
        assert max(got["shares"][1:]) >= 0.5
    assert list(tmp_path.iterdir()) == []
