"""The bench itself: two contestants train alike, their traffic is the closed form, and a failure is a line. The bars of the host."""

from functools import partial

import pytest

from tests.bench.__main__ import row, table
from tests.bench.bench_host import ROWS, measure, ratio
from tests.bench.contestants import CONTESTANTS
from tests.bench.modules import Task
from tests.bench.turns import Job, race

TASK = Task(width=64, blocks=2, rows=4, length=8)


def _fails(meter):
    raise ValueError("no such device\nmore")


def test_a_contestant_that_fails_is_a_line_of_the_table():
    job = Job("broken", _fails, 1)
    race([job], 1, 1, 60, lambda text: None)
    assert job.error == "ValueError: no such device"
    assert "| broken | 1 | ValueError: no such device |" in table([row(job, {}, 1)])


@pytest.mark.long
def test_contestants_train_alike_and_traffic_is_the_closed_form():
    names = ("Lightning DDP", "3D zero0", "FSDP2 by hand, zero3", "PipelineStage by hand")
    jobs = {name: Job(name, partial(CONTESTANTS[name].train, TASK), 2) for name in names}
    race(list(jobs.values()), 2, 3, 120, lambda text: None)
    assert {job.name: job.error for job in jobs.values() if job.error} == {}
    parameters = sum(parameter.numel() for parameter in TASK.model().parameters())
    for name in names:
        assert jobs[name].loss == pytest.approx(jobs["Lightning DDP"].loss, rel=1e-4), name
        assert len(jobs[name].turns) == 3
    activations = 4 * TASK.rows * TASK.length * TASK.width
    for name, wanted in {"Lightning DDP": 4 * parameters, "3D zero0": 4 * parameters}.items():
        assert jobs[name].found["sent"] == pytest.approx(wanted, rel=0.01)  # 2 (n - 1) / n of the gradients
    assert jobs["FSDP2 by hand, zero3"].found["sent"] == pytest.approx(1.5 * 4 * parameters, rel=0.2)
    assert jobs["PipelineStage by hand"].found["sent"] == pytest.approx(activations, rel=0.01)


@pytest.mark.long
def test_a_step_costs_the_host_no_more_than_its_bar():
    found = measure(list(ROWS), steps=20, rounds=7, say=lambda text: None)
    ratios = {name: ratio(found, name) for name, (_, base, _) in ROWS.items() if base}
    assert {name: each for name, each in ratios.items() if each > ROWS[name][2]} == {}
