"""The card behaves like a device: CUDA's refusals, waits and orders, shown by what breaks them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_3d.axes.group import Group
from tests.device import card, streams, waits
from tests.device.groups import BACKEND
from tests.device.ranks import run
from tests.workers import WorkerError


def _refused(call):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 10))


def _train(model, device):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        tokens = torch.randint(0, 10, (4, 7), generator=torch.Generator().manual_seed(step)).to(device)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _one_card():
    device = torch.device("card", 0)
    ours, theirs = torch.ones(2, 3, device=device), torch.ones(2, 3)
    mixed = [lambda: ours + theirs, lambda: theirs + ours, lambda: torch.cat([ours, theirs]), lambda: ours.mm(theirs.T)]
    mixed += [lambda: ours.addcmul_(ours, theirs), lambda: torch._foreach_add_([ours], [theirs])]
    before = card.Memory.allocated
    model = _model().to(device)
    weights = card.Memory.allocated - before
    with waits.noted() as places:
        quick = ours.sum(), ours.to("cpu", non_blocking=True), theirs.to(device, non_blocking=True), ours * 2
        assert not places
        for read in (quick[0].item, ours.any().__bool__, ours.cpu, ours.nonzero, lambda: ours[ours > 0], ours.tolist):
            count = len(places)
            read()
            assert len(places) > count
        for wait in (streams.synchronize, streams.FIRST.synchronize, streams.FIRST.record_event().synchronize):
            count = len(places)
            wait()
            assert len(places) > count
    with waits.noted(refused=True):
        read = _refused(ours.sum().item)
    return {
        "mixed": [_refused(each) for each in mixed],
        "of no dimension": (ours + torch.tensor(2.0)).cpu(),
        "new": torch.empty(3, device=device).cpu(),
        "weights": (weights, sum(parameter.nbytes for parameter in model.parameters())),
        "losses": (_train(_model(), "cpu"), _train(model, device)),
        "read": read,
        "place": places[0],
    }


def test_a_card_computes_as_the_host_and_refuses_its_tensors():
    (got,) = run(_one_card, world=1)
    assert all("Expected all tensors to be on the same device" in each for each in got["mixed"])
    assert got["of no dimension"].equal(torch.full((2, 3), 3.0))
    assert got["new"].isnan().all()
    assert got["weights"][0] == got["weights"][1]
    torch.testing.assert_close(*got["losses"])
    assert "synchronizing operation: _local_scalar_dense" in got["read"]
    assert "test_card.py" in got["place"]


def _sums(order):
    """Collectives and messages of two ranks, and the values of a sum before and after its wait."""
    device = torch.device("card", 0)
    dist.init_process_group(BACKEND, device_id=device)
    rank = dist.get_rank()
    total = torch.full((3,), rank + 1.0, device=device)
    work = dist.all_reduce(total, async_op=True)
    early = card.on_host(total).clone()
    work.wait()
    got, peer = torch.empty(2, device=device), 1 - rank
    messages = [dist.P2POp(dist.isend, torch.full((2,), rank + 5.0, device=device), peer)]
    for work in dist.batch_isend_irecv([*messages, dist.P2POp(dist.irecv, got, peer)]):
        work.wait()
    refused = _refused(lambda: dist.all_reduce(torch.ones(2)))
    calls = [lambda: dist.all_reduce(total), lambda: dist.broadcast(total, 0)]
    for call in calls[:: order[rank]]:
        call()
    return early.tolist(), total.tolist(), got.tolist(), refused


def test_messages_of_cards_are_under_way_in_one_order():
    for rank, (early, total, got, refused) in enumerate(run(_sums, (1, 1), world=2, delays=0.2)):
        assert (early, total, got) == ([rank + 1.0] * 3, [6.0] * 3, [6.0 - rank] * 2)
        assert refused == "No backend type associated with device type cpu"


def test_an_order_that_differs_between_ranks_is_an_error():
    """NCCL would hang, or add what does not belong together."""
    with pytest.raises(WorkerError, match=r"(?s)rank 0.*OrderError.*all_reduce\(SUM\) of 3.*broadcast\(0\)") as error:
        run(_sums, (1, -1), world=2)
    assert str(error.value).count("OrderError: ranks") == 2


def _averages():
    """Sums that the library divides on the way, of one value and of this rank's half of several."""
    device = torch.device("card", 0)
    dist.init_process_group(BACKEND, device_id=device)
    group, half = Group(), torch.empty(2, device=device)
    whole, value = (
        torch.arange(4.0, device=device) * dist.get_rank(),
        torch.full((3,), float(group.rank), device=device),
    )
    group.reduce_scatter(half, whole, average=True)
    group.all_reduce(value, average=True)
    return group.averages, value.tolist(), half.tolist()


def test_a_group_of_nccl_averages_in_the_library():
    for rank, got in enumerate(run(_averages, world=2)):
        assert got == (True, [0.5] * 3, [[0.0, 0.5], [1.0, 1.5]][rank])


def _late(follows):
    """A copy on a stream, read before or after its event: the memory, and what an operation does."""
    device, stream = torch.device("card", 0), streams.Stream()
    source, target = torch.ones(4, device=device), torch.zeros(4, device=device)
    stream.wait_stream(streams.FIRST)
    with stream:
        assert source.isinf().shape == source.shape  # torch gives it an empty tensor to write to
        target.copy_(source)
        event = stream.record_event()
    if follows:
        event.wait()
    return card.on_host(target).tolist(), _refused(target.cpu)


def test_a_read_before_its_event_reads_old_data_and_is_refused():
    (early, refused), (late, allowed) = [run(_late, follows, world=1, delays=0.3)[0] for follows in (False, True)]
    assert (early, late, allowed) == ([0.0] * 4, [1.0] * 4, "")
    assert "copy_ uses memory that another stream uses" in refused


def _unordered():
    """A stream that does not follow the first; pinned memory that is written while a copy may read it."""
    device, stream = torch.device("card", 0), streams.Stream()
    source, pinned = torch.ones(4, device=device), torch.zeros(4).pin_memory()
    with stream:
        forgotten = _refused(lambda: source * 2)
    source.copy_(pinned, non_blocking=True)
    before = streams.FIRST.record_event()
    source.copy_(pinned, non_blocking=True)
    before.synchronize()
    pinned.fill_(1)
    return forgotten, _refused(streams.synchronize)


def test_a_stream_that_forgets_to_wait_and_host_memory_used_early_are_refused():
    ((forgotten, early),) = run(_unordered, world=1)
    assert "mul uses memory that another stream uses" in forgotten
    assert "written while a copy to the card could read it" in early


def _sharded():
    device = torch.device("card", 0)
    dist.init_process_group(BACKEND, device_id=device)
    mesh, model = init_device_mesh("card", (2,)), _model().to(device)
    for part in (model[1], model[4], model):
        fully_shard(part, mesh=mesh)
    return _train(_model(), "cpu"), _train(model, device)


def test_torchs_own_sharding_trains_on_late_cards():
    for wanted, got in run(_sharded, world=2, delays=0.003):
        torch.testing.assert_close(got, wanted)
