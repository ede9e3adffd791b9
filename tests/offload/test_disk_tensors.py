"""Tensors on a disk: their values, the memory they take, and what a disk refuses."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from lightning_3d.errors import ConfigurationError, RunError
from lightning_3d.offload import disk_file
from lightning_3d.offload.disk_file import PAGE, DiskFile
from lightning_3d.offload.disk_tensors import DiskTransfers

SIZE = 50_000


def _stored(folder, count=6, budget=3 * 4 * (SIZE + PAGE)):
    """`count` tensors on a disk, their values, and their transfers."""
    file, transfers = DiskFile(Path(folder)), DiskTransfers(budget)
    values = [torch.randint(100, (SIZE,)).float() for _ in range(count)]
    tensors = [value.clone() for value in values]
    items = [transfers.store(file, [[tensor]])[0] for tensor in tensors]
    transfers.finish()
    return transfers, items, tensors, values


def test_values_are_read_changed_and_written_within_the_budget(tmp_path):
    transfers, items, tensors, values = _stored(tmp_path)
    for step in (1, 2):
        for index, item in enumerate(items):
            batch = transfers.fetch([item])
            if index + 1 < len(items):
                transfers.prefetch([items[index + 1]])
            tensors[index].add_(1)
            transfers.put_back(batch, changed=True)
            assert transfers.taken <= transfers.budget
        transfers.finish()
        assert transfers.taken == 0
        for tensor, value in zip(tensors, values, strict=True):
            assert torch.equal(tensor, value + step)


def test_what_was_only_read_is_not_written(tmp_path):
    transfers, items, tensors, values = _stored(tmp_path, count=1)
    moved = transfers.moved
    transfers.put_back(transfers.fetch(items), changed=False)
    assert transfers.moved == moved + items[0].nbytes
    assert torch.equal(tensors[0], values[0])


def test_a_read_waits_for_the_write_of_each_of_its_tensors(tmp_path, monkeypatch):
    transfers, items, tensors, values = _stored(tmp_path, count=3, budget=10**7)
    whole = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda *args: time.sleep(0.1) or whole(*args))
    batch = transfers.fetch(items[:2])
    tensors[1].add_(1)
    transfers.put_back(batch, changed=True)
    transfers.fetch(items[1:])
    assert torch.equal(tensors[1], values[1] + 1)


def test_a_change_between_steps_is_what_the_next_fetch_reads(tmp_path):
    """User code may change a tensor that is on the disk, as it may any other."""
    transfers, items, tensors, values = _stored(tmp_path, count=2)
    tensors[0].mul_(2)
    batch = transfers.fetch(items)
    assert torch.equal(tensors[0], values[0] * 2)
    transfers.put_back(batch, changed=False)


def test_another_order_of_use_drops_what_was_read_ahead(tmp_path):
    transfers, items, tensors, values = _stored(tmp_path)
    transfers.prefetch(items[:1])
    transfers.prefetch(items[1:2])
    transfers.prefetch(items[2:3])
    batch = transfers.fetch(items[3:6])
    assert all(torch.equal(tensor, value) for tensor, value in zip(tensors, values, strict=True))
    transfers.put_back(batch, changed=False)


def test_tensors_of_the_same_memory_stay_together(tmp_path):
    file, transfers = DiskFile(tmp_path), DiskTransfers(10**7)
    flat = torch.randn(SIZE)
    rows = flat.view(-1, 100)[:-3]
    transfers.store(file, [[flat, rows]])
    transfers.finish()
    rows[0] = 7
    assert torch.equal(flat[:100], torch.full((100,), 7.0))


def test_a_buffered_file_works_alike(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_DIRECT")
    monkeypatch.delattr(os, "O_TMPFILE")
    test_values_are_read_changed_and_written_within_the_budget(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_short_read_goes_on(tmp_path, monkeypatch):
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, parts, at: whole(fd, [parts[0][:PAGE]], at))
    transfers, items, tensors, values = _stored(tmp_path, count=1)
    transfers.fetch(items)
    assert torch.equal(tensors[0], values[0])


def test_a_file_that_ends_early_is_an_error(tmp_path):
    transfers, items, _, _ = _stored(tmp_path, count=1)
    os.truncate(items[0].region.file.descriptor, 0)
    with pytest.raises(RunError, match="cut it short"):
        transfers.fetch(items)


def test_nothing_is_left_after_a_kill(tmp_path):
    child = os.fork()
    if not child:
        DiskFile(tmp_path).reserve(10**6, "a test")  # no computation: torch's threads are not in a fork
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_two_jobs_in_one_folder_do_not_meet(tmp_path):
    one, other = _stored(tmp_path, count=1), _stored(tmp_path, count=1)
    one[2][0].fill_(1)
    assert torch.equal(other[2][0], other[3][0])


def test_a_full_disk_is_an_error_with_the_numbers(tmp_path):
    file = DiskFile(tmp_path)
    with pytest.raises(ConfigurationError, match=r"no room for the states: this rank needs 1000 TB"):
        file.reserve(10**15, "the states")
    assert file.size == 0


def test_a_folder_must_be_there_and_writable(tmp_path):
    with pytest.raises(ConfigurationError, match="no such folder"):
        DiskFile(tmp_path / "missing")
    with pytest.raises(ConfigurationError, match="may not make a file"):
        DiskFile(Path("/proc"))


def test_memory_that_looks_like_a_disk_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(disk_file, "_file_system", lambda folder: "tmpfs")
    with pytest.warns(UserWarning, match="that is memory"):
        DiskFile(tmp_path)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs here")
def test_the_file_system_is_found():
    assert disk_file._file_system(Path("/dev/shm")) == "tmpfs"
