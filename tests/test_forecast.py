"""What the planner says of each rank, against what real ranks held and sent."""

import pytest

from lightning_3d import Strategy3D
from lightning_3d.dryrun.forecast import forecast
from lightning_3d.planner.catalogue import cluster_here
from tests.planner.sized import LAYOUTS, SIZED
from tests.planner.watching import by_axis, predicted, watch
from tests.workers import run

SMALL = {
    "GPT": {"width": 64, "layers": 4, "vocabulary": 128, "context": 32},
    "ResidualMLP": {"width": 128, "layers": 4},
    "Llama": {"width": 64, "layers": 4, "vocabulary": 128, "context": 32},
}
QUICK = [("GPT", "4 tensor x pipeline"), ("ResidualMLP", "2 zero3"), ("Llama", "2 tensor"), ("GPT", "2 zero0")]


def compare_rank(rank, seen):
    """States and bytes to the last one."""
    assert (rank.states.weights, rank.states.optimizer) == (seen["weights"], seen["optimizer"])
    for step in seen["sent"]:
        assert {axis: sent for axis, sent in rank.sent.items() if sent} == by_axis(step)


@pytest.mark.parametrize(("name", "layout"), QUICK)
def test_states_and_bytes_of_every_axis_are_exact(name, layout):
    world = int(layout.split()[0])
    results = run(watch, name, layout, SMALL[name], world=world, timeout=90)
    for rank, seen in zip(predicted(name, layout, **SMALL[name]).ranks, results, strict=True):
        compare_rank(rank, seen)
    axes = {axis for rank in predicted(name, layout, **SMALL[name]).ranks for axis, sent in rank.sent.items() if sent}
    assert axes, "something is sent in each of these"


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", SIZED)
def test_states_bytes_and_peak_memory_of_every_layout(name, layout):
    world = int(layout.split()[0])
    results = run(watch, name, layout, world=world, timeout=120)
    for rank, seen in zip(predicted(name, layout).ranks, results, strict=True):
        compare_rank(rank, seen)
        assert rank.peak == pytest.approx(seen["peak"], rel=0.10)


def test_seconds_count_the_sums_that_the_module_has():
    profiles = [predicted(name, "2 tensor", **sizes).plan.job.profile for name, sizes in SMALL.items()]
    assert [profile.block_sums for profile in profiles] == [4, 2, 4], "a residual block has one part that is split"
    assert [profile.outside_sums for profile in profiles] == [2, 0, 2], "embedding and head"
    gpt, _, llama = profiles
    assert llama.block_kernels > 2 * gpt.block_kernels > 0, "its norms and rotations are many small ones"


def test_nothing_is_changed_by_a_forecast():
    module = SIZED["GPT"](**SMALL["GPT"])
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    forecast(
        module, module.batch(), Strategy3D(tensor_parallel_size=2)._wanted, cluster_here("cpu", devices_per_node=2)
    )
    assert all((parameter == before[name]).all() for name, parameter in module.named_parameters())
    assert all(parameter.grad is None for parameter in module.parameters())
