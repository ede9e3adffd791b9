"""What the seconds of a step are made of."""

import pytest

from lightning_3d.layout import Layout
from lightning_3d.tools.planner.catalogue import Catalogue
from lightning_3d.tools.planner.hardware import Cluster
from lightning_3d.tools.planner.job import Job
from lightning_3d.tools.planner.profile import Profile
from lightning_3d.tools.planner.step_time import (
    USUAL_KERNELS,
    StepTime,
    pass_times,
    step_time,
    tensor_sums,
    traffic_seconds,
)

PROFILE = Profile(name="x", layers=4, block_parameters=1000, block_flops=1e9, boundary_elements=100)
ALONE = Layout(data_parallel_size=1)


def job(**changes):
    return Job(profile=Profile(**{**vars(PROFILE), **changes}), samples=1, batch=1, precision="32")


def machine(**changes):
    return Cluster(accelerator=Catalogue.load().find("cpu", **changes), nodes=1, devices_per_node=1)


def traffic(job, **changes):
    return sum(traffic_seconds(job, ALONE, machine(block_launch_us=1000, **changes), micro=1))


def test_a_device_hides_what_the_host_starts():
    assert traffic(job(block_flops=1e12)) < 1e-3
    assert traffic(job(block_flops=1)) == pytest.approx(4e-3, rel=0.01)


def test_blocks_of_more_kernels_take_longer_to_start():
    usual = traffic(job(block_flops=1))
    assert traffic(job(block_flops=1, block_kernels=USUAL_KERNELS)) == usual
    assert traffic(job(block_flops=1, block_kernels=3 * USUAL_KERNELS)) == pytest.approx(usual + 8e-3)
    assert traffic(job(block_flops=1, outside_kernels=2 * USUAL_KERNELS)) == pytest.approx(usual + 2e-3)


def test_sums_over_tensor_ranks():
    assert tensor_sums(job(), Layout(tensor_parallel_size=2)) == 16
    assert tensor_sums(job(), Layout(tensor_parallel_size=2, recompute="full")) == 20


def test_waiting_for_the_host_is_not_called_memory_bandwidth():
    waiting = machine(block_launch_us=1e6)
    bus, launching = traffic_seconds(job(), ALONE, waiting, micro=1)
    assert (bus, launching > 3) == (0, True)
    assert step_time(job(), ALONE, waiting, micro=1, microbatches=1).limit == "host (kernels)"
    assert StepTime(compute=1, traffic=2).limit == "memory bus"


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_backward_that_recomputes_runs_in_one_piece(recompute):
    times = {
        kind: pass_times(
            PROFILE, Layout(pipeline_parallel_size=2, schedule="zbv_zero_bubble", recompute=kind), useful=3, again=1
        )
        for kind in ("none", recompute)
    }
    assert times["none"].backward_weight == 1
    assert (times[recompute].backward_input, times[recompute].backward_weight) == (3, 0)
