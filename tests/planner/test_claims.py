"""Numbers of docs/planner.md, choose.md and memory.md that no other test executes."""

import re
from pathlib import Path

import pytest

from lightning_3d.layout import LARGE_LOGITS, LOGITS_PART, Layout
from lightning_3d.optim.state_bytes import number_bytes
from lightning_3d.pipeline.stage_costs import bubble_share
from lightning_3d.tools.planner import job, sizing
from lightning_3d.tools.planner.advice import A100_PEAK, RULE_HOURS, RULE_SHARE
from lightning_3d.tools.planner.catalogue import Catalogue
from lightning_3d.tools.planner.job import Job, usual_batch
from lightning_3d.tools.planner.known_models import named_model
from lightning_3d.tools.planner.memory import LOGITS_IN_USE, layers_on_rank
from lightning_3d.tools.planner.priced_layout import LOST_SECONDS, price_layout, slowest
from lightning_3d.tools.planner.profile import Profile
from lightning_3d.tools.planner.search import Pins, leaders

DOCS = Path(__file__).parents[2] / "docs"
PLANNER, CHOOSE, MEMORY = (
    " ".join((DOCS / f"{name}.md").read_text().split()) for name in ("planner", "choose", "memory")
)
CATALOGUE = Catalogue.load()


def numbers(pattern, page=PLANNER):
    found = re.search(pattern, page)
    assert found, pattern
    return [float(group.replace(",", "")) for group in found.groups()]


def states(precision):
    kinds = number_bytes(precision).states("adam")
    return [kinds.weights, kinds.gradients, kinds.optimizer]


def test_bytes_of_a_parameter():
    assert numbers(r"\| (\d) \+ (\d) \+ (\d) for each parameter with Adam in `32` and `-mixed`") == states("32")
    assert states("bf16-mixed") == states("32")
    assert numbers(r"`-mixed`, (\d) \+ (\d) \+ (\d) in `-true`") == states("bf16-true")
    papers = numbers(r"Papers count (\d) \+ (\d) \+ (\d+) bytes for mixed precision")
    assert sum(papers) == sum(states("bf16-mixed")) == numbers(r"Adam \((\d+) bytes a parameter\)", CHOOSE)[0]
    assert numbers(r"optimizer states \((\d)\).*gradients \((\d)\).*weights \((\d)\)", MEMORY) == states("32")[::-1]


@pytest.mark.parametrize(("billions", "gigabytes"), [(1, 16), (7, 112), (30, 480)])
def test_states_by_the_size_of_a_model(billions, gigabytes):
    assert f"{billions}B | " in CHOOSE or f"{billions}B to" in CHOOSE
    assert f"{gigabytes} GB" in CHOOSE
    assert billions * sum(states("bf16-mixed")) == gigabytes


def test_messages_and_idle_time():
    asked = Job(profile=named_model("llama-7b").profile(), samples=1e6, batch=64, precision="32")
    layouts = [Layout(data_parallel_size=8, zero_stage=stage) for stage in (1, 3)]
    sent = [price_layout(asked, CATALOGUE.cluster("8xh100"), one, micro=8).sent(0)["data_parallel"] for one in layouts]
    assert "ZeRO 3 sends half as much again" in CHOOSE
    assert "half as much sent again" in MEMORY
    assert sent[1] / sent[0] == pytest.approx(1.5, rel=0.03)
    assert "`(p - 1) / (m + p - 1)`" in CHOOSE
    assert bubble_share("1f1b", stages=4, microbatches=16) == pytest.approx(3 / 19)


def test_the_batch_that_is_assumed():
    few, many = numbers(r"near ([\d.]+)M to (\d)M tokens")
    sizes = [named_model(name).profile() for name in ("gpt2", "gpt3-175b")]
    assert [usual_batch(one, 1) * one.tokens for one in sizes] == pytest.approx([few * 1e6, many * 1e6], rel=0.1)
    assert "four times as much: half a sample for each device" in PLANNER
    assert (job._MOST_TIMES, job.DEVICES_PER_SAMPLE) == (4, 2)


def test_sizes_that_are_tried():
    nodes = numbers(r"tries every node count up to (\d+)")
    assert nodes == [sizing.DENSE]
    assert "prime factor above 7. Then it tries the eight next smaller" in PLANNER
    assert sizing.NEIGHBOURS == 8
    assert all(sizing.ROUND % prime == 0 for prime in (2, 3, 5, 7))
    assert sizing.ROUND % 11


def test_uneven_stages():
    blocks, layers, ranks = (int(one) for one in numbers(r"(\d+) blocks for (\d+) over (\d+)"))
    assert (
        layers_on_rank(Profile(name="", layers=layers, block_parameters=1), Layout(pipeline_parallel_size=ranks))
        == blocks
    )


def test_latency_failures_and_slow_machines():
    h100 = CATALOGUE.find("h100")
    hops = numbers(r"([\d.]+) microseconds in a node, ([\d.]+) between nodes, ([\d.]+) to start")
    assert hops == [h100.node_hop_us, h100.network_hop_us, h100.start_us]
    hours, failures, days, devices = numbers(
        r"One in ([\d,]+) hours of a device: Llama 3 had (\d+) in (\d+) days of ([\d,]+)"
    )
    assert hours == h100.failure_hours == pytest.approx(days * 24 * devices / failures, rel=1e-3)
    interruptions, minutes = numbers(r"less than 10% of the time to (\d+) interruptions, (\d+) minutes each")
    assert round(LOST_SECONDS / 60) == minutes
    assert interruptions * LOST_SECONDS <= 0.1 * days * 86400
    share, slower, many, most, few, least = numbers(
        r"found ([\d.]+)% of machines about (\d+)% slower. So a cluster of ([\d,]+) nodes takes (\d+)% more time, and"
        r" one of (\d+) nodes ([\d.]+)%"
    )
    assert share / 100 == h100.slow_share
    for nodes, more in ((many, most), (few, least)):
        assert 100 * (slowest(CATALOGUE.cluster(f"{nodes:.0f}x8xh100")) - 1) == pytest.approx(more, abs=0.05)
    assert 100 * (slowest(CATALOGUE.cluster("100000x1xh100")) - 1) == pytest.approx(slower)


def test_the_rule_of_thumb():
    hours, share, peak = numbers(r"([\d.]+) hours of an A100 per .* at (\d+)% of (\d+) TFLOP/s")
    assert (hours, share / 100, peak * 1e12) == (RULE_HOURS, RULE_SHARE, A100_PEAK)
    assert hours == pytest.approx(6e18 / (RULE_SHARE * A100_PEAK) / 3600, rel=0.01)


def test_large_logits():
    large, part = numbers(r"From (\d+) MB of logits on a rank .* parts of (\d+) MB")
    assert (large * 2**20, part * 2**20) == (LARGE_LOGITS, LOGITS_PART)
    assert "five parts of" in PLANNER
    assert LOGITS_IN_USE == 5


def test_links_of_racks_and_pods():
    rack, v6e, v5p = numbers(r"(\d+) devices in a GB200 rack \| the pod: (\d+) chips of v6e, ([\d,]+) of v5p")
    assert [rack, v6e, v5p] == [CATALOGUE.find(name).link_domain for name in ("gb200", "tpu-v6e", "tpu-v5p")]


def test_the_commands_that_compare_a_deadline_and_a_budget():
    """docs/memory.md: the cost of 8 and 16 devices is in the answer."""
    profile = named_model("llama-7b").profile()
    asked = Job(profile=profile, samples=10e9 / profile.tokens, batch=512)
    costs = [leaders(asked, CATALOGUE.cluster(f"{nodes}x8xh100"), Pins())[0].dollars for nodes in (1, 2)]
    assert all(costs)
