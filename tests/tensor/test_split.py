import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_3d.tensor.geometry import TensorSplit, assemble, chunk, local_part


@given(st.integers(1, 60), st.integers(1, 7))
def test_chunks_cover_in_order(size, ranks):
    pieces = [chunk(size, rank, ranks) for rank in range(ranks)]
    assert [index for start, stop in pieces for index in range(start, stop)] == list(range(size))
    if size >= ranks:
        assert all(stop > start for start, stop in pieces)


@given(st.integers(1, 5), st.lists(st.integers(5, 20), min_size=1, max_size=3), st.integers(0, 1))
def test_shards_assemble_in_source_order(ranks, parts, dim):
    shape = [3, 3]
    shape[dim] = sum(parts)
    whole = torch.arange(3 * sum(parts)).view(shape)
    split = TensorSplit.even(dim, sum(parts), ranks, sections=parts)
    shards = [local_part(whole, split, rank) for rank in range(ranks)]
    assert torch.equal(assemble(shards, split), whole)
    assert split.sections == tuple(parts)
    for rank, shard in enumerate(shards):
        assert shard.shape[dim] == split.local_size(rank)
        for (start, stop), (low, high) in split.boxes(rank):
            there, here = whole.narrow(dim, start, stop - start), shard.narrow(dim, low, high - low)
            assert torch.equal(there, here)


def test_even_chunks_are_those_of_dtensor():
    assert [chunk(50, rank, 4) for rank in range(4)] == [(0, 13), (13, 26), (26, 39), (39, 50)]
    assert [chunk(4, rank, 3) for rank in range(3)] == [(0, 2), (2, 3), (3, 4)]  # DTensor would leave one with nothing
