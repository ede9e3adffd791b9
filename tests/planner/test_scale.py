"""The seconds of a step, costs that grow with the number of ranks, and the devices that an answer names."""

from dataclasses import asdict, replace

import pytest

from lightning_3d.errors import PlannerError
from lightning_3d.layout import Layout
from lightning_3d.tools.planner.catalogue import Catalogue
from lightning_3d.tools.planner.hardware import Cluster
from lightning_3d.tools.planner.job import Job, usual_batch
from lightning_3d.tools.planner.known_models import named_model
from lightning_3d.tools.planner.priced_layout import LOST_SECONDS, SLOWNESS, price_layout, running_share, slowest
from lightning_3d.tools.planner.profile import Profile
from lightning_3d.tools.planner.sizing import Sizes
from lightning_3d.tools.planner.step_time import (
    USUAL_KERNELS,
    StepTime,
    pass_times,
    ring_latency,
    step_time,
    sum_latency,
    tensor_sums,
    traffic_seconds,
)
from tests.planner.test_options import planned

CATALOGUE = Catalogue.load()


def test_a_ring_takes_a_hop_for_each_rank_and_a_tree_for_each_doubling():
    node, nodes = CATALOGUE.cluster("8xh100"), CATALOGUE.cluster("128x8xh100")
    assert ring_latency(node, span=8, stride=1) == pytest.approx((8.4 + 7 * 3.4) * 1e-6)
    assert ring_latency(nodes, span=1024, stride=1) == pytest.approx((8.4 + 896 * 3.4 + 127 * 14) * 1e-6)
    assert ring_latency(nodes, span=128, stride=8) == pytest.approx((8.4 + 127 * 14) * 1e-6)
    assert sum_latency(nodes, span=1024, stride=1) == pytest.approx((8.4 + 2 * (7 * 4 + 7 * 14)) * 1e-6)
    assert ring_latency(node, span=1, stride=1) == sum_latency(node, span=1, stride=1) == 0


def test_llama_3_ran_nine_tenths_of_the_time():
    """419 failures in 54 days of 16,384 devices: one in 3.1 hours, and more than 90% of the time was useful."""
    where = CATALOGUE.cluster("2048x8xh100")
    between = where.accelerator.failure_hours / where.devices
    assert between == pytest.approx(54 * 24 / 419, rel=1e-3)
    assert running_share(where) == pytest.approx(between * 3600 / (between * 3600 + LOST_SECONDS))
    assert 0.9 < running_share(where) < 0.93
    assert running_share(CATALOGUE.cluster("2048x8xh100", failure_hours=0)) == 1


def test_racks_and_pods_are_reached_by_the_links_of_a_node():
    assert CATALOGUE.cluster("36x4xgb200").domain == 72
    assert CATALOGUE.cluster("8xh100").domain == 8
    assert Cluster.of(CATALOGUE.find("tpu-v4"), 64).domain == 64


@pytest.mark.parametrize(("field", "value"), [("memory_gb", 81920), ("peak_tflops.bf16", 989_000)])
def test_a_number_in_another_unit_is_refused(field, value):
    name, _, part = field.partition(".")
    with pytest.raises(PlannerError, match="no device has more than"):
        CATALOGUE.find("h100", **{name: {part: value} if part else value})


def test_no_neighbour_with_fewer_devices_meets_the_deadline(capsys):
    line = "llama-7b --tokens 300B --accelerator h100"
    plan = planned(capsys, f"{line} --gpus-for 12days")["plans"][0]
    assert plan["days"] <= 12
    nodes = plan["cluster"]["nodes"]
    for fewer in range(max(1, nodes - 3), nodes):
        assert planned(capsys, f"llama-7b --tokens 300B --cluster {fewer}x8xh100")["plans"][0]["days"] > 12


def test_round_sizes_and_neighbours():
    sizes = Sizes(CATALOGUE.cluster("8xh100"), lambda cluster, within: None)
    assert sizes.sizes(4, 160, dense=True) == [4, 5, 6, 7, *range(8, 129, 8), 144, 160]
    assert sizes.below(24) == [16, 8]


def test_288_years_are_an_answer(capsys):
    """GPT-3 on one V100: it does not fit, and the time is asked for."""
    found = planned(capsys, "175b --tokens 300B --cluster 1xv100-32g --sustained 34.7 --batch 1 --precision 16-true")
    assert any("288 years" in note for note in found["notes"])
    assert any("does not fit" in note for note in found["notes"])
    assert any(note.startswith("--sustained: all layouts take the same time") for note in found["notes"])
    assert 280 < found["plans"][0]["days"] / 365.25 < 300


def test_the_call_of_a_plan_is_the_plan(capsys):
    from lightning_3d import Strategy3D

    plan = planned(capsys, "llama-70b --cluster 4x8xh100 --tensor 8 --pipeline 2 --schedule 1f1b --precision bf16-true")
    best = plan["plans"][0]
    text = best["strategy"]
    call = text[text.index("Strategy3D(") : text.index(")) with") + 1]
    chosen = eval(call, {"Strategy3D": Strategy3D}).settings.base.fit(32)
    assert asdict(chosen) == best["layout"]
    assert "sequence_parallel=True" in call


def test_one_slow_machine_holds_up_all():
    """MegaScale (arXiv 2402.15627): 0.5% of machines, about 10% slower."""
    one, many = (CATALOGUE.cluster(f"{nodes}x8xh100") for nodes in (1, 1536))
    assert slowest(one) == pytest.approx(1 + SLOWNESS * one.accelerator.slow_share)
    assert 1.0999 < slowest(many) < 1 + SLOWNESS
    healthy = CATALOGUE.cluster("1536x8xh100", slow_share=0)
    assert slowest(healthy) == 1
    profile = named_model("llama-7b").profile()
    asked = Job(profile=profile, samples=1e6, batch=12288)
    times = [price_layout(asked, where, Layout(data_parallel_size=12288), micro=1) for where in (many, healthy)]
    assert times[0].time == times[1].time
    assert times[0].seconds == pytest.approx(times[1].seconds * slowest(many))
    known = replace(times[0], job=replace(asked, sustained=4e14))
    assert known.seconds == known.time.total * known.job.steps


def test_a_batch_is_assumed_for_every_data_rank_that_is_asked_for(capsys):
    """ZeRO 3 over all of 32,768 devices is priced, and its MFU is below that of 8."""
    found = {}
    for cluster in ("8xh100", "4096x8xh100"):
        line = f"llama-7b --cluster {cluster} --tokens 300B --zero 3 --tensor 1 --pipeline 1"
        found[cluster] = planned(capsys, line)["plans"][0]
    assert found["4096x8xh100"]["layout"]["data_parallel_size"] == 32768
    assert found["4096x8xh100"]["mfu"] < 0.6 * found["8xh100"]["mfu"]
    assert usual_batch(named_model("llama-7b").profile(), 384, 3, 384) == 1152


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
