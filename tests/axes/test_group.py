"""A group that no other process belongs to: each rank has its own values, and bytes are counted all the same."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_3d.axes.group import Group, broadcast_tensors
from lightning_3d.axes.ledger import Ledger
from lightning_3d.ranks import agreement, talk
from tests.axes.rings import ring
from tests.workers import run


@pytest.fixture
def simulated():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", [ring, lambda ranks, ledger: Group(ranks, "data", ledger)], ids=["ring", "library"])
def test_a_simulated_group_sends_nothing_and_counts_what_it_would(simulated, kind):
    ledger, mine, shard = Ledger(), torch.arange(8.0), torch.zeros(2)
    group = kind(dist.group.WORLD, ledger)
    group.all_reduce(mine, average=True)
    group.begin_all_reduce(mine[:7])()
    group.all_max(mine)
    group.reduce_scatter(shard, mine)
    group.all_gather(torch.zeros(8), shard)
    group.broadcast(mine, 1)
    group.begin_swap("send", {0: mine, 2: mine}, {0: shard}, 0)()
    assert group.simulated and mine.tolist() == list(range(8))
    assert [(row.collective, row.calls, row.bytes) for row in ledger.rows()] == [
        ("all_gather", 1, 3 * 8),
        ("all_reduce", 3, 3 * 2 * 3 * 8),  # seven numbers travel as eight
        ("broadcast", 1, 32),
        ("reduce_scatter", 1, 3 * 8),
        ("send", 1, 64),
    ]


def test_a_simulated_rank_hears_itself(simulated):
    talk.meet("a place that no other rank reaches")
    assert talk.gather("mine") == ["mine"] * 4
    assert talk.from_first(lambda: "mine") == agreement.together(lambda: "mine") == "mine"
    assert talk.PendingMax([1, 2], dist.group.WORLD).wait() == talk.largest_of([1, 2]) == [1, 2]
    assert not talk.failed_everywhere(own_error=True)


def test_without_a_job_a_group_is_this_process():
    group, mine = Group(), torch.arange(3.0)
    group.all_reduce(mine)
    assert (group.size, group.rank, group.silent, group.simulated) == (1, 0, True, False)
    assert torch.equal(group.all_rows(mine), torch.arange(3.0)[None])


def _begun():
    """Both collectives that may be under way while a rank goes on, and the first rank's tensors."""
    group, rank = Group(dist.group.WORLD), dist.get_rank()
    shard, summed = torch.zeros(2), torch.full((3,), float(rank))
    ends = [group.begin_reduce_scatter(shard, torch.arange(4.0) + rank), group.begin_all_reduce(summed, average=True)]
    for end in ends:
        end()
    columns, row = (torch.arange(12.0) + 10 * rank).view(3, 4)[:, :2], torch.full((2,), float(rank), dtype=torch.double)
    broadcast_tensors([columns, row], group)
    return shard.tolist(), summed.tolist(), columns.tolist(), row.tolist()


def test_collectives_that_are_begun_end_and_columns_of_a_matrix_are_broadcast():
    for rank, got in enumerate(run(_begun, world=2, group=True)):
        first = [[0.0, 1.0], [4.0, 5.0], [8.0, 9.0]]
        assert got == ([[1.0, 3.0], [5.0, 7.0]][rank], [0.5] * 3, first, [0.0, 0.0])
