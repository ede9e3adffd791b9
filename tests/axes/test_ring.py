"""The ring gives what the library gives, the same bits on every rank, for exactly the bytes it should."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_3d.axes.group import Group
from lightning_3d.axes.ledger import Ledger
from lightning_3d.axes.ring import _last_add
from lightning_3d.axes.ring_wire import RingWire
from lightning_3d.comm.grad_sync import Hierarchical
from lightning_3d.errors import LayoutError
from lightning_3d.ranks.process_groups_private import timeout_of
from tests.axes.rings import ring
from tests.workers import WorkerError, on_ranks, run

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}


def _values(length, dtype, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randn(length, generator=generator).to(dtype)


def _same_on_all(tensor):
    others = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(others, tensor)
    return all(torch.equal(other, tensor) for other in others)


class _Counted:
    """Messages, and the bytes that are sent with them."""

    def __init__(self, messages, wire):
        self.messages, self.wire = messages, wire
        self.own_memory, self.land, self.flush = messages.own_memory, messages.land, messages.flush

    def post(self, receive, send):
        self.wire.sent += 0 if send is None else send.nbytes
        self.messages.post(receive, send)


class _Wire(RingWire):
    sent = 0

    def begin(self, *, host):
        return _Counted(super().begin(host=host), self)


def _group(shared, segment):
    """Over shared memory, as between ranks of one machine, or over the process group, as between machines."""
    wire = _Wire(dist.new_group())
    wire._tried, wire.segment_bytes = not shared, segment
    return Group(wire.group, "data", Ledger(), wire)


def _all_reduce(lengths, dtypes, segments, shared):
    group = _group(shared, None)
    wire, size = group.wire, group.size
    for dtype in dtypes:
        for length in lengths:
            for segment in segments:
                mine = _values(length, dtype, length)
                expected = mine.double().clone()
                dist.all_reduce(expected)
                for average in (False, True):
                    buffer = mine.clone()
                    group.ledger, wire.sent, wire.segment_bytes = Ledger(), 0, segment
                    group.all_reduce(buffer, average=average)
                    want = expected / size if average else expected
                    close = torch.allclose(buffer.double(), want, atol=TOLERANCE[dtype] * size, rtol=TOLERANCE[dtype])
                    assert close, (dtype, length, segment, average)
                    padded = -(-length // size) * size
                    sent = 2 * (size - 1) * padded // size * mine.element_size()
                    assert wire.sent == group.ledger.bytes("data", "all_reduce") == sent
                    assert _same_on_all(buffer), (dtype, length, segment)
    assert (wire._shared is not None) == (shared and size > 1)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_reduce(world, shared):
    run(_all_reduce, (0, 1, 2, 5, 17, 4099), tuple(TOLERANCE), (64, 1 << 20), shared, world=world, group=True)


@pytest.mark.long
def test_all_reduce_on_eight_ranks():
    run(_all_reduce, (1, 7, 4099), (torch.float32,), (256,), True, world=8, group=True)


def _parts(length, shared):
    group = _group(shared, 128)
    wire, size, rank = group.wire, group.size, group.rank
    for pieces in ([length], [length, 3, 0, 1]):
        inputs = [_values(piece * size, torch.float32, piece) for piece in pieces]
        outputs = [torch.empty(piece) for piece in pieces]
        expected = [value.double() for value in inputs]
        for value in expected:
            dist.all_reduce(value)
        group.ledger, wire.sent, sent = Ledger(), 0, (size - 1) * sum(pieces) * 4
        group.reduce_scatter(outputs, [value.clone() for value in inputs])
        assert wire.sent == group.ledger.bytes("data", "reduce_scatter") == sent
        for output, value in zip(outputs, expected, strict=True):
            torch.testing.assert_close(output.double(), value.view(size, -1)[rank], atol=1e-5, rtol=1e-5)
        wholes = [torch.empty(piece * size) for piece in pieces]
        group.all_gather(wholes, outputs)
        assert wire.sent == 2 * sent
        assert group.ledger.bytes("data", "all_gather") == sent
        for whole, value in zip(wholes, expected, strict=True):
            torch.testing.assert_close(whole.double(), value, atol=1e-5, rtol=1e-5)
            assert _same_on_all(whole)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_reduce_scatter_and_all_gather(world, shared):
    run(_parts, 1001, shared, world=world, group=True)


@on_ranks(2)
def test_a_length_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="7 elements are not 2 parts of 3"):
        _group(True, 128).reduce_scatter(torch.empty(3), torch.empty(7))
    dist.barrier()  # the other rank may still be connecting


def _alike(ranks_per_node):
    """Ring, native and hierarchical collectives give the same and count the same."""
    ledger = Ledger()
    size, rank = dist.get_world_size(), dist.get_rank()
    kinds = {
        "ring": ring(dist.new_group(), ledger, "ring"),
        "native": Group(dist.new_group(), "native", ledger),
        "hierarchical": Hierarchical(dist.new_group(), ledger, "hierarchical", ranks_per_node),
    }
    length = 12 * size
    mine = _values(length, torch.float32)
    total = mine.clone()
    dist.all_reduce(total)
    for name, collectives in kinds.items():
        part, whole, buffer, odd = torch.empty(12), torch.empty(length), mine.clone(), mine[:-1].clone()
        collectives.reduce_scatter(part, mine.clone(), average=True)
        torch.testing.assert_close(part, total.view(size, -1)[rank] / size)
        collectives.all_gather(whole, part)
        torch.testing.assert_close(whole, total / size)
        collectives.all_reduce(buffer, average=False)
        torch.testing.assert_close(buffer, total)
        collectives.all_reduce(odd, average=True)
        torch.testing.assert_close(odd, total[:-1] / size)
        assert _same_on_all(odd), name
    counts = {name: ledger.bytes(name, "reduce_scatter") for name in ("ring", "native")}
    counts["inside"] = ledger.bytes("hierarchical.inside", "reduce_scatter")
    counts["between"] = ledger.bytes("hierarchical.between", "reduce_scatter")
    return counts


def test_the_three_kinds_agree():
    counts = run(_alike, 2, world=4, group=True)[0]
    assert counts["ring"] == counts["native"] == 3 * 12 * 4
    # Of 48 numbers half stay in the rank, half of the rest cross; the all-reduces of both links count their own way.
    assert counts["inside"] >= 24 * 4
    assert counts["between"] == 12 * 4


def test_a_mean_of_halves_is_rounded_once():
    """Their sum is too large for the type."""
    own, arrived = torch.full((2, 3), 6e4, dtype=torch.float16)
    assert _last_add(torch.empty_like(own), arrived, own.clone(), 2).equal(own)


@on_ranks(2)
def test_the_rings_of_nodes_wait_as_long_as_the_group():
    group = dist.new_group(timeout=timedelta(seconds=7))
    hierarchical = Hierarchical(group, Ledger(), "data", 2)
    assert timeout_of(hierarchical.inside.ranks) == timeout_of(hierarchical.between.ranks) == timedelta(seconds=7)


def _uneven_nodes():
    Hierarchical(dist.new_group(), Ledger(), "data", 2)


def test_nodes_must_divide_the_ranks():
    with pytest.raises(WorkerError, match=f"{LayoutError.__name__}.*2 ranks per node cannot cover 3"):
        run(_uneven_nodes, world=3, group=True)
