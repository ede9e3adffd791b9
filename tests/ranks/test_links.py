"""Messages of a pipeline over a group for each neighbour and direction, as on devices."""

import itertools
from types import SimpleNamespace

import pytest

from lightning_3d.axes.group import Group
from lightning_3d.layout import SCHEDULES, stage_ranks
from lightning_3d.pipeline.schedule import actions
from lightning_3d.ranks import groups, talk
from tests.parity import train
from tests.workers import run


@pytest.mark.parametrize("size", range(2, 9))
def test_rounds_join_each_pair_of_neighbours_once(size):
    pairs = [pair for part in groups.rounds(size) for pair in part]
    assert sorted(pairs) == sorted({(min(at, (at + 1) % size), max(at, (at + 1) % size)) for at in range(size)})
    for part in groups.rounds(size):
        ranks = [rank for pair in part for rank in pair]
        assert len(ranks) == len(set(ranks))


def _over_links(name, world, strategy):
    """Train with links, although gloo needs none; returns the run and the sizes of the groups that sent."""
    sizes, link_of = set(), Group._link

    def noted(group, peer, tag):
        link, other = link_of(group, peer, tag)
        sizes.add((link.size(), link is group.ranks))
        return link, other

    instead = {**vars(talk), "takes_cpu_tensors": lambda group: False}
    groups.talk, Group._link = SimpleNamespace(**instead), noted
    try:
        return train(name, world, strategy, {}, {"max_epochs": 1}), sizes
    finally:
        groups.talk, Group._link = talk, link_of


@pytest.mark.parametrize(
    ("world", "strategy"),
    [
        pytest.param(
            3,
            {"pipeline_parallel_size": 3, "schedule": "interleaved_1f1b", "stages_per_rank": 2},
            marks=pytest.mark.long,
        ),
        pytest.param(
            4, {"pipeline_parallel_size": 2, "schedule": "zbv_zero_bubble", "zero_stage": 2}, marks=pytest.mark.long
        ),
        (2, {"pipeline_parallel_size": 2, "schedule": "zbv_zero_bubble"}),
    ],
    ids=["looped", "v-shaped-zero2", "v-shaped"],
)
def test_a_pipeline_over_links_trains_the_same(world, strategy):
    name = "tests.checkpoint.trainings:DeepGPT"
    wanted = run(train, name, world, strategy, {}, {"max_epochs": 1}, world=world)
    for (got, sizes), other in zip(run(_over_links, name, world, strategy, world=world), wanted, strict=True):
        assert sizes == {(2, False)}
        assert got["losses"] == other["losses"]
        assert all((got["weights"][key] == value).all() for key, value in other["weights"].items())


def _messages(schedule, ranks, per_rank, microbatches):
    """(link, rank) -> the stage and microbatch that each message on the link comes from, in the rank's own order."""
    placement, found = stage_ranks(schedule, ranks, per_rank), {}
    for rank, mine in enumerate(actions(schedule, schedule, ranks, per_rank, microbatches)):
        for action in mine:
            if action.kind.startswith(("SEND", "RECV")):
                other = action.stage + (1 if action.kind in ("SEND_F", "RECV_B") else -1)
                source = action.stage if action.kind.startswith("SEND") else other
                link = (frozenset({rank, placement[other]}), action.kind[-1])
                found.setdefault((link, rank), []).append((source, action.microbatch))
    return found


@pytest.mark.filterwarnings("ignore:schedule=")  # does not take so few microbatches
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_both_ends_of_a_link_have_its_messages_in_one_order(schedule):
    """NCCL ignores tags: the next receive takes the next message."""
    for ranks, microbatches in itertools.product((2, 3, 4), (1, 4, 8)):
        found = _messages(schedule, ranks, SCHEDULES[schedule].stages_per_rank or 2, microbatches)
        assert found
        for (link, rank), mine in found.items():
            (other,) = link[0] - {rank}
            assert mine == found[link, other]
