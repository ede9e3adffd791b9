"""Whatever happens during a save, the checkpoint before it stays."""

import errno
import os
import resource
import time
import zipfile
from itertools import count
from multiprocessing import get_context
from random import Random
from threading import Timer

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import distributed as dist

from lightning_3d.checkpoint.keeper import Keeper
from lightning_3d.checkpoint.save import SaveFailed
from lightning_3d.checkpoint.single_file import save_file
from lightning_3d.checkpoint.stored import Opened
from lightning_3d.errors import CheckpointError
from tests.checkpoint.made import InLine, save
from tests.parity import long, silent

OLD, NEW = {"state_dict.w": torch.zeros(8, 4)}, {"state_dict.w": torch.ones(8, 4)}


def value(path):
    opened = Opened.open(path)
    opened.verify()
    return float(opened.tensors["state_dict.w"].read_full()[0, 0])


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_second_save_takes_the_place_of_the_first(tmp_path):
    for tensors in (OLD, NEW):
        assert save(tmp_path / "x.ckpt", tensors) == [None, None]
    assert value(tmp_path / "x.ckpt") == 1
    assert len(list((tmp_path / "x.ckpt").iterdir())) == 4  # manifest, state, two parts


@pytest.mark.parametrize(("rank", "written"), [(0, ["x.ckpt"]), (1, [])])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_one_file_is_written_by_rank_0_also_before_the_ranks_can_talk(
    tmp_path, monkeypatch, rank, written, asynchronous
):
    monkeypatch.setattr(rank_zero_only, "rank", rank)  # as a launcher says
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr("lightning_3d.checkpoint.keeper.PATIENCE", 0.1)  # rank 0 has a disk of its own
    keeper = Keeper("full", asynchronous)
    keeper.save_file({"state_dict": {}}, tmp_path / "x.ckpt", TorchCheckpointIO(), None)
    keeper.close()
    assert [path.name for path in tmp_path.iterdir()] == written


def test_other_ranks_see_the_file_also_before_the_ranks_can_talk(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    first = Timer(0.2, (tmp_path / "x.ckpt").touch)
    first.start()
    Keeper("full").save_file({"state_dict": {}}, tmp_path / "x.ckpt", TorchCheckpointIO(), None)
    assert (tmp_path / "x.ckpt").exists()


@pytest.mark.parametrize("before", [True, False])
def test_full_disk(tmp_path, monkeypatch, before):
    path = tmp_path / "x.ckpt"
    if before:
        save(path, OLD)
    left = sorted(path.iterdir()) if before else []
    monkeypatch.setattr(os, "fsync", full_disk)
    problems = save(path, NEW)
    monkeypatch.undo()
    assert all(isinstance(problem, SaveFailed) and "No space left" in str(problem) for problem in problems)
    assert "rank 0" in str(problems[1])
    assert (sorted(path.iterdir()) if path.exists() else []) == left
    assert not before or value(path) == 0


class Killed(BaseException):
    """Nothing is cleaned up after it, as after SIGKILL."""


@pytest.mark.parametrize("moment", range(9))
def test_kill_at_any_moment(tmp_path, monkeypatch, moment):
    """One rank's save, stopped before each thing it does to the disk in turn."""
    path = tmp_path / "x.ckpt"
    save(path, OLD, ranks=1)
    count = 0

    def counted(original):
        def work(*args, **kwargs):
            nonlocal count
            count += 1
            if count > moment:
                raise Killed
            return original(*args, **kwargs)

        return work

    for name in ("fsync", "replace", "unlink"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.checkpoint.made.Thread", InLine)
        try:
            save(path, NEW, ranks=1)
            killed = False
        except Killed:
            killed = True
    monkeypatch.undo()
    assert value(path) == (0 if killed and moment < 4 else 1)
    save(path, NEW, ranks=1)  # and what was left half-written goes with the next save
    assert value(path) == 1
    assert len(list(path.iterdir())) == 3


def _save_for_ever(path, size, begins):
    torch.set_num_threads(1)
    begins.set()
    for number in count(1):
        save(path, {f"state_dict.w{index}": torch.full((size, 16), float(number)) for index in range(4)})


def test_killed_for_real_while_it_saves(tmp_path):
    """SIGKILL at random moments: what is there is whole, and all of one save."""
    path, random = tmp_path / "x.ckpt", Random(0)
    save(path, {f"state_dict.w{index}": torch.zeros(2000, 16) for index in range(4)})
    seen = []
    while len(seen) < 8 or (not any(seen) and len(seen) < 80):  # a busy machine takes more than one try for a save
        begins = get_context("fork").Event()
        process = get_context("fork").Process(target=_save_for_ever, args=(path, 2000, begins))
        process.start()
        assert begins.wait(60)
        time.sleep(random.uniform(0.02, 0.2))
        process.kill()
        process.join()
        opened = Opened.open(path)
        opened.verify()
        values = {float(value) for tensor in opened.tensors.values() for value in tensor.read_full().unique()}
        assert len(values) == 1
        seen += values
    assert any(seen)  # some saves came through
    del opened  # what is read stays
    save(path, NEW)
    assert len(list(path.iterdir())) == 4  # nothing half-written stays


STATE = {"state_dict": {"a": torch.arange(10.0), "b": torch.arange(25).view(5, 5)}, "global_step": 3}


def same(loaded):
    return loaded["global_step"] == 3 and all(
        torch.equal(loaded["state_dict"][name], tensor) for name, tensor in STATE["state_dict"].items()
    )


@pytest.mark.parametrize("save", [pytest.param(save_file, id="ours"), long(torch.save, id="Lightning's")])
def test_each_flipped_bit_is_found_or_changes_nothing(tmp_path, save):
    path = tmp_path / "x.ckpt"
    save(STATE, path)
    raw = path.read_bytes()
    directory = zipfile.ZipFile(path).start_dir
    bits = [*range(0, directory * 8, 13), *range(directory * 8, len(raw) * 8)]
    keeper, io, found = Keeper(), TorchCheckpointIO(), 0
    for bit in bits:
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with silent():
            try:
                loaded = keeper._load(path, None, io)
            except CheckpointError:
                found += 1
                continue
        assert same(loaded), f"bit {bit} of {len(raw) * 8}"
    assert found > (0.9 if save is save_file else 0.3) * len(bits)


def test_torch_and_lightning_load_what_is_sealed(tmp_path):
    path = tmp_path / "x.ckpt"
    save_file(STATE, path)
    assert same(torch.load(path, weights_only=True))
    assert same(torch.load(path, weights_only=True, mmap=True))
    assert same(TorchCheckpointIO().load_checkpoint(path))


@pytest.mark.parametrize("free", [5, 7, 11, 14, 20])
def test_a_disk_that_fills_up_is_an_error_of_the_disk(tmp_path, free):
    path = tmp_path / "x.ckpt"
    save_file(STATE, path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free * 1024, before[1]))
    try:
        with pytest.raises(OSError) as caught:
            save_file({"state_dict": {f"w{index}": torch.ones(3000) for index in range(3)}}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.errno == errno.EFBIG
    assert [file.name for file in tmp_path.iterdir()] == ["x.ckpt"]
    assert same(torch.load(path, weights_only=True))


@pytest.mark.parametrize("name", ["x.ckpt.part", "x.ckpt.0123456789abcdef.part"])
def test_a_link_that_lies_there_is_not_followed(tmp_path, name):
    path, other = tmp_path / "x.ckpt", tmp_path / "other"
    other.write_text("precious")
    (tmp_path / name).symlink_to(other)
    save_file(STATE, path)
    assert other.read_text() == "precious"
    assert same(torch.load(path, weights_only=True))


def test_what_a_killed_save_left_goes_with_the_next(tmp_path):
    (tmp_path / "x.ckpt.0123456789abcdef.part").write_bytes(b"half")
    (tmp_path / "y.ckpt.0123456789abcdef.part").write_bytes(b"of another")
    save_file(STATE, tmp_path / "x.ckpt")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["x.ckpt", "y.ckpt.0123456789abcdef.part"]
